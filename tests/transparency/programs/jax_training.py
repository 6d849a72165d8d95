#!/usr/bin/env python3
"""JAX: grad and jit of a small network, scan, vmap and donated buffers, under the allocator of the environment."""

import os

from common import bits, check, find_jax

flags = "--xla_gpu_deterministic_ops=true --xla_gpu_autotune_level=0"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip()
jax = find_jax()
import jax.numpy as jnp  # noqa: E402
import numpy  # noqa: E402

jax.config.update("jax_default_matmul_precision", "highest")
random = numpy.random.default_rng(17)
weights = [
    jnp.asarray(random.normal(0, 0.1, (64, 256)).astype(numpy.float32)),
    jnp.asarray(random.normal(0, 0.1, (256, 256)).astype(numpy.float32)),
    jnp.asarray(random.normal(0, 0.1, (256, 8)).astype(numpy.float32)),
]


def forward(weights, x):
    for w in weights[:-1]:
        x = jnp.tanh(x @ w)
    return x @ weights[-1]


def loss(weights, x, y):
    return jnp.mean((forward(weights, x) - y) ** 2)


@jax.jit
def step(weights, x, y):
    value, slopes = jax.value_and_grad(loss)(weights, x, y)
    return [w - 0.1 * s for w, s in zip(weights, slopes)], value


first = last = None
for i in range(60):
    rows = 32 * (1 + i % 4)
    x = jnp.asarray(random.normal(0, 1, (rows, 64)).astype(numpy.float32))
    y = jnp.sin(x[:, :8])
    weights, value = step(weights, x, y)
    last = float(value)
    first = last if first is None else first
    if i % 20 == 19:
        print(f"step {i + 1} loss {last:.4f}")
check("loss falls", last < first)


@jax.jit
def running(x):
    return jax.lax.scan(lambda total, value: (total + value, total + value), jnp.int32(0), x)[1]


x = jnp.arange(10_000, dtype=jnp.int32)
check("scan", bool((running(x) == jnp.cumsum(x)).all()))
rows = jnp.arange(64 * 1000, dtype=jnp.int32).reshape(64, 1000)
check("vmap", bool((jax.vmap(lambda r: jnp.sort(-r))(rows) == jnp.sort(-rows, axis=1)).all()))
add = jax.jit(lambda a: a + 1, donate_argnums=0)
a = jnp.zeros(1 << 20, jnp.int32)
for _ in range(50):
    a = add(a)
check("donated buffers", bool((a == 50).all()))
print("bits", bits(numpy.asarray(running(x)), numpy.asarray(a)))
