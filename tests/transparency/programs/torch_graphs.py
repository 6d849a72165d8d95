#!/usr/bin/env python3
"""torch.cuda.graph: capture and replay with private and shared pools, several shapes, memory taken between replays."""

from common import bits, check, torch_with_gpu

torch = torch_with_gpu()


def network(width):
    torch.manual_seed(width)
    return torch.nn.Sequential(
        torch.nn.Linear(width, 4 * width), torch.nn.GELU(), torch.nn.Linear(4 * width, width)
    ).cuda().eval()


def warm_up(call):
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side), torch.no_grad():
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(side)


results = []
pool = torch.cuda.graph_pool_handle()
graphs = []
for width, shared in ((64, False), (128, False), (96, True), (160, True)):
    model = network(width)
    given = torch.zeros(32, width, device="cuda")
    warm_up(lambda: model(given))
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph, pool=pool if shared else None):
        # Temporaries of a capture live in the graph's pool, across replays.
        answer = model(given)
        for _ in range(10):
            answer = model(answer) + given
    graphs.append((width, model, given, graph, answer))
for turn in range(20):
    for width, model, given, graph, answer in graphs:
        fresh = torch.randn(32, width, device="cuda")
        given.copy_(fresh)
        graph.replay()
        got = answer.clone()
        with torch.no_grad():
            wanted = model(fresh)
            for _ in range(10):
                wanted = model(wanted) + fresh
        # Memory that comes and goes between replays must not be the graph's.
        torch.full((1 << 20,), float("nan"), device="cuda")
        if not torch.allclose(got, wanted, rtol=1e-4, atol=1e-4):
            check(f"replay {turn} of width {width}", False)
        results.append(got)
check("replays", True)

model = network(64).train()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, capturable=True)
given, target = torch.randn(64, 64, device="cuda"), torch.randn(64, 64, device="cuda")


def train():
    optimizer.zero_grad(set_to_none=True)
    loss = torch.nn.functional.mse_loss(model(given), target)
    loss.backward()
    optimizer.step()
    return loss


side = torch.cuda.Stream()
side.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(side):
    for _ in range(3):
        train()
torch.cuda.current_stream().wait_stream(side)
graph = torch.cuda.CUDAGraph()
optimizer.zero_grad(set_to_none=True)
with torch.cuda.graph(graph):
    loss = train()
losses = []
for _ in range(30):
    graph.replay()
    losses.append(loss.item())
check("the captured step learns", losses[-1] < losses[0])
print("losses", " ".join(f"{value:.5f}" for value in losses[::10]))
del graph, graphs, loss
torch.cuda.empty_cache()
print("bits", bits(*results))
