#!/usr/bin/env python3
"""NCCL through torch.distributed over all cards present, one process each: the collectives, then DDP training."""

import os
import socket

from common import bits, check, torch_with_gpu

# Multicast over NVLink needs privileges and hardware that many machines do not lend.
os.environ["NCCL_NVLS_ENABLE"] = "0"


def rank_main(rank, world, port):
    torch = torch_with_gpu()
    import torch.distributed as dist

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    dist.init_process_group("nccl", rank=rank, world_size=world, device_id=device)
    good = True
    results = []
    for n in (1, 1000, 1 << 20, 20_000_001):
        a = torch.arange(n, dtype=torch.int32, device=device) % 1000 + rank
        dist.all_reduce(a)
        wanted = (torch.arange(n, dtype=torch.int32, device=device) % 1000) * world + world * (world - 1) // 2
        good = good and torch.equal(a, wanted)
        results.append(a)
        del wanted
    parts = [torch.empty(5000, dtype=torch.int64, device=device) for _ in range(world)]
    dist.all_gather(parts, torch.full((5000,), rank, dtype=torch.int64, device=device))
    good = good and all(bool((part == i).all()) for i, part in enumerate(parts))
    share = torch.empty(4096, dtype=torch.int32, device=device)
    dist.reduce_scatter_tensor(share, torch.ones(4096 * world, dtype=torch.int32, device=device))
    good = good and bool((share == world).all())
    word = torch.full((100,), rank, dtype=torch.int32, device=device)
    dist.broadcast(word, world - 1)
    good = good and bool((word == world - 1).all())
    # Asynchronous, with memory that comes and goes meanwhile.
    handles = []
    for i in range(30):
        b = torch.full((100_000 + 1000 * i,), i, dtype=torch.int32, device=device)
        handles.append((i, b, dist.all_reduce(b, async_op=True)))
        torch.empty(3 << 20, dtype=torch.uint8, device=device)
    for i, b, handle in handles:
        handle.wait()
        good = good and bool((b == i * world).all())

    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 64)).to(device)
    model = torch.nn.parallel.DistributedDataParallel(model, device_ids=[rank])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    generator = torch.Generator().manual_seed(100 + rank)
    for _ in range(20):
        x = torch.randn(32, 64, generator=generator).to(device)
        loss = ((model(x) - x) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    good = good and losses[-1] < losses[0]
    verdict = torch.tensor([int(good)], device=device)
    dist.all_reduce(verdict, op=dist.ReduceOp.MIN)
    if rank == 0:
        print("collectives of", world, "processes", bits(*results))
        print("losses", " ".join(f"{value:.4f}" for value in losses[::6]))
        check("every rank", verdict.item() == 1)
    ok = verdict.item() == 1
    dist.barrier()
    dist.destroy_process_group()
    if not ok:
        raise SystemExit(1)


def main():
    torch = torch_with_gpu()
    import torch.multiprocessing as mp

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    world = torch.cuda.device_count()
    mp.spawn(rank_main, args=(world, port), nprocs=world)


if __name__ == "__main__":
    main()
