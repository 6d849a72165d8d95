/* Graphs whose launch may make a stream wait for the host or for another process. */
#ifndef GR_STREAM_H
#define GR_STREAM_H

#include "shim.h"

/* A node of the type is about to be added to some graph by hand: it may wait for the host, or work on any device. */
void gr_stream_graph_node(CUgraphNodeType type);

/*
 * Called before the launch of a graph, which may have such a node. Where gr_stream_graph_begins returns true,
 * gr_stream_graph_began must follow, with the launch's result, which it returns.
 */
bool gr_stream_graph_begins(void);
CUresult gr_stream_graph_began(CUresult result);

#endif
