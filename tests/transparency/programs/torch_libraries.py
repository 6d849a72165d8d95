#!/usr/bin/env python3
"""What PyTorch calls cuDNN, cuFFT, cuSOLVER, cuSPARSE and cuRAND for, with their workspaces; pinned data loading."""

from common import bits, check, torch_with_gpu

torch = torch_with_gpu()

torch.manual_seed(2)
model = torch.nn.Sequential(
    torch.nn.Conv2d(3, 32, 3, padding=1), torch.nn.BatchNorm2d(32), torch.nn.ReLU(), torch.nn.MaxPool2d(2),
    torch.nn.Conv2d(32, 64, 3, padding=1), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(64 * 16 * 16, 10),
).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
losses = []
x, y = torch.randn(96, 3, 32, 32), torch.randint(0, 10, (96,))
loader = torch.utils.data.DataLoader(
    torch.utils.data.TensorDataset(x, y), batch_size=32, num_workers=2, pin_memory=True, drop_last=True
)
for _ in range(4):
    for images, labels in loader:
        loss = torch.nn.functional.cross_entropy(
            model(images.cuda(non_blocking=True)), labels.cuda(non_blocking=True)
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
check("convolutions learn", losses[-1] < losses[0])
print("losses", " ".join(f"{value:.4f}" for value in losses[::4]))

for n in (8, 300, 1024):
    a = torch.randn(n, n, device="cuda", dtype=torch.float64)
    b = torch.randn(n, 4, device="cuda", dtype=torch.float64)
    check(f"solve {n}", torch.allclose(a @ torch.linalg.solve(a, b), b, atol=1e-6))
    q, r = torch.linalg.qr(a)
    check(f"qr {n}", torch.allclose(q @ r, a, atol=1e-9))
    values = torch.linalg.eigvalsh(a + a.T)
    check(f"eigenvalues {n}", abs(values.sum().item() - (a + a.T).trace().item()) < 1e-6)
    square = a @ a.T + n * torch.eye(n, device="cuda", dtype=torch.float64)
    factor = torch.linalg.cholesky(square)
    check(f"cholesky {n}", torch.allclose(factor @ factor.T, square, atol=1e-6))
    u, s, v = torch.linalg.svd(a)
    check(f"svd {n}", torch.allclose(u @ torch.diag(s) @ v, a, atol=1e-8))
for n in (17, 1 << 12, 999_983, 1 << 21):
    signal = torch.randn(n, device="cuda", dtype=torch.float64)
    check(f"fft {n}", torch.allclose(torch.fft.irfft(torch.fft.rfft(signal), n), signal, atol=1e-9))
dense = (torch.rand(2000, 2000, device="cuda") < 0.01).float() * torch.randint(1, 9, (2000, 2000), device="cuda")
ones = torch.ones(2000, 16, device="cuda")
for layout in ("csr", "coo"):
    sparse = dense.to_sparse_csr() if layout == "csr" else dense.to_sparse()
    check(f"sparse product, {layout}", torch.equal(sparse @ ones, dense @ ones))
torch.manual_seed(9)
floats, whole = torch.rand(1000, device="cuda"), torch.randint(0, 9, (1000,), device="cuda")
print("random numbers", bits(floats, whole, torch.randperm(5000, device="cuda")))
words = torch.randint(0, 1000, (1 << 20,), device="cuda")
unique, counts = torch.unique(words, return_counts=True)
check("unique", int(counts.sum()) == 1 << 20)
half = torch.randint(0, 3, (512, 512), device="cuda").half()
check("half product", torch.equal((half @ half).float(), half.float() @ half.float()))
print("bits", bits(unique, counts))
