#!/usr/bin/env python3
"""Memory of one card that another card's process reads and writes: NCCL's registered buffers, PyTorch's symmetric
memory, tensors sent to a process, and copies between the cards of one process."""

import os
import socket

from common import bits, check, torch_with_gpu

# Multicast over NVLink needs privileges and hardware that many machines do not lend.
os.environ["NCCL_NVLS_ENABLE"] = "0"
os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"

COUNT = 1 << 20


def registered(torch, dist, device, rank, world):
    """A pool of ncclMemAlloc, registered, used by collectives, and given back."""
    backend = dist.group.WORLD._get_backend(device)
    pool = torch.cuda.MemPool(backend.mem_allocator)
    results = []
    with torch.cuda.use_mem_pool(pool):
        tensors = [torch.full((COUNT + i,), rank + i, dtype=torch.int32, device=device) for i in range(4)]
    backend.register_mem_pool(pool)
    for i, tensor in enumerate(tensors):
        dist.all_reduce(tensor)
        results.append(bool((tensor == world * i + world * (world - 1) // 2).all()))
    torch.cuda.synchronize()
    backend.deregister_mem_pool(pool)
    del tensors, pool
    return all(results)


def symmetric(torch, dist, device, rank, world):
    """Each rank reads what the others wrote into their own memory."""
    import torch.distributed._symmetric_memory as symmetric_memory

    group = dist.group.WORLD
    good = True
    for count in (4096, COUNT):
        tensor = symmetric_memory.empty(count, dtype=torch.float32, device=device)
        handle = symmetric_memory.rendezvous(tensor, group.group_name)
        tensor.fill_(rank + 1)
        handle.barrier()
        other = (rank + 1) % world
        good = good and bool((handle.get_buffer(other, (count,), torch.float32) == other + 1).all())
        handle.barrier()
        sum = torch.ops.symm_mem.one_shot_all_reduce(tensor, "sum", group.group_name)
        good = good and bool((sum == world * (world + 1) / 2).all())
        torch.ops.symm_mem.two_shot_all_reduce_(tensor, "sum", group.group_name)
        good = good and bool((tensor == world * (world + 1) / 2).all())
        handle.barrier()
        del tensor, handle
    return good


def rank_main(rank, world, port, inbox, outbox):
    torch = torch_with_gpu()
    import torch.distributed as dist

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    dist.init_process_group("nccl", rank=rank, world_size=world, device_id=device)
    answers = {"registered buffers": registered(torch, dist, device, rank, world),
               "symmetric memory": symmetric(torch, dist, device, rank, world)}
    # Rank 0 sends tensors of its card; the last rank reads them from there and from a copy on its own.
    if rank == 0:
        sent = [torch.arange(n, dtype=torch.int32, device=device) for n in (10, 100_000, 5_000_000)]
        torch.cuda.synchronize()
        inbox.put(sent)
        outbox.get()
        del sent
    elif rank == world - 1:
        received = inbox.get()
        answers["tensors of another process"] = all(
            torch.equal(tensor.to(device), torch.arange(len(tensor), dtype=torch.int32, device=device))
            for tensor in received)
        del received
        torch.cuda.synchronize()
        outbox.put("read")
    for name in ("registered buffers", "symmetric memory", "tensors of another process"):
        verdict = torch.tensor([int(answers.get(name, True))], device=device)
        dist.all_reduce(verdict, op=dist.ReduceOp.MIN)
        if rank == 0:
            print(f"{name}: {'ok' if verdict.item() == 1 else 'WRONG'}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


def one_process(torch, world):
    """A model whose halves live on two cards, and copies to and fro."""
    first, last = torch.device("cuda", 0), torch.device("cuda", world - 1)
    front = torch.nn.Linear(512, 512).to(first)
    back = torch.nn.Linear(512, 512).to(last)
    optimizer = torch.optim.SGD([*front.parameters(), *back.parameters()], lr=0.05)
    generator = torch.Generator().manual_seed(5)
    losses = []
    for i in range(30):
        x = torch.randn(64 + 8 * (i % 5), 512, generator=generator)
        out = back(torch.relu(front(x.to(first))).to(last))
        loss = ((out - x.to(last)) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    there_and_back = torch.arange(3_000_000, dtype=torch.int32, device=first).to(last).to(first)
    check("there and back", bool((there_and_back == torch.arange(3_000_000, device=first)).all()))
    print("losses", " ".join(f"{value:.4f}" for value in losses[::6]), bits(front.weight, back.weight))


def main():
    torch = torch_with_gpu()
    import torch.multiprocessing as mp

    world = torch.cuda.device_count()
    one_process(torch, world)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = mp.get_context("spawn")
    mp.spawn(rank_main, args=(world, port, context.Queue(), context.Queue()), nprocs=world)


if __name__ == "__main__":
    main()
