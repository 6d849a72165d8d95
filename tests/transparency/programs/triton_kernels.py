#!/usr/bin/env python3
"""Three Triton kernels over changing sizes, held against PyTorch; integers and exact floats only."""

from common import bits, check, skip, torch_with_gpu

torch = torch_with_gpu()
try:
    import triton
    import triton.language as tl
except ImportError:
    skip("no Triton")


@triton.jit
def scale_add(x, y, out, n, factor, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    tl.store(out + at, tl.load(x + at, mask=inside) * factor + tl.load(y + at, mask=inside), mask=inside)


@triton.jit
def row_sums(x, out, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    values = tl.load(x + row * columns + at, mask=at < columns, other=0)
    tl.store(out + row, tl.sum(values, axis=0))


@triton.jit
def product(a, b, c, n, BLOCK: tl.constexpr):
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)
    for start in range(0, n, BLOCK):
        inner = start + tl.arange(0, BLOCK)
        left = tl.load(a + rows[:, None] * n + inner[None, :])
        right = tl.load(b + inner[:, None] * n + columns[None, :])
        total += tl.dot(left, right)
    tl.store(c + rows[:, None] * n + columns[None, :], total)


results = []
for n in (1, 1000, 4097, 1 << 20, 3_000_001):
    x = torch.randint(-1000, 1000, (n,), device="cuda", dtype=torch.int32)
    y = torch.randint(-1000, 1000, (n,), device="cuda", dtype=torch.int32)
    out = torch.empty_like(x)
    scale_add[(triton.cdiv(n, 1024),)](x, y, out, n, 3, BLOCK=1024)
    check(f"scale and add {n}", torch.equal(out, x * 3 + y))
    results.append(out)
for rows, columns in ((7, 33), (512, 1000), (4096, 777)):
    x = torch.randint(0, 100, (rows, columns), device="cuda", dtype=torch.int32)
    out = torch.empty(rows, device="cuda", dtype=torch.int32)
    row_sums[(rows,)](x, out, columns, BLOCK=triton.next_power_of_2(columns))
    check(f"row sums {rows} x {columns}", torch.equal(out.long(), x.long().sum(1)))
    results.append(out)
for n in (64, 512):
    a = torch.randint(0, 4, (n, n), device="cuda").half()
    b = torch.randint(0, 4, (n, n), device="cuda").half()
    c = torch.empty(n, n, device="cuda")
    product[(n // 32, n // 32)](a, b, c, n, BLOCK=32)
    check(f"product {n}", torch.equal(c, a.float() @ b.float()))
    results.append(c)
print("bits", bits(*results))
