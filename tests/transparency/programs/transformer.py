#!/usr/bin/env python3
"""Hugging Face transformers from random weights: training steps and generate() of a small GPT-2 or Llama."""

import sys

from common import bits, check, skip, torch_with_gpu

torch = torch_with_gpu()
try:
    import transformers
except ImportError:
    skip("no transformers")
transformers.logging.set_verbosity_error()

kind = sys.argv[1] if len(sys.argv) > 1 else "gpt2"
torch.manual_seed(11)
if kind == "gpt2":
    config = transformers.GPT2Config(
        vocab_size=500, n_positions=128, n_embd=128, n_layer=3, n_head=4, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0,
        bos_token_id=0, eos_token_id=None, attn_implementation="eager",
    )
    model = transformers.GPT2LMHeadModel(config)
else:
    config = transformers.LlamaConfig(
        vocab_size=500, hidden_size=128, intermediate_size=352, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, bos_token_id=0, eos_token_id=None, pad_token_id=None,
        attn_implementation="eager",
    )
    model = transformers.LlamaForCausalLM(config)
model = model.cuda().train()
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
losses = []
for i in range(20):
    length = 16 + 13 * (i % 5)
    # A sequence that counts is quickly learnt, so that the loss must fall.
    start = torch.randint(0, 400, (8, 1), generator=torch.Generator().manual_seed(i))
    tokens = (start + torch.arange(length)) % 500
    tokens = tokens.cuda()
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    losses.append(loss.item())
check("training", losses[-1] < losses[0])
print("losses", " ".join(f"{value:.4f}" for value in losses[::5]))

model.eval()
prompt = (torch.arange(12).repeat(2, 1) + torch.tensor([[3], [90]])).cuda()
with torch.no_grad():
    settings = dict(attention_mask=torch.ones_like(prompt), max_new_tokens=24, pad_token_id=0)
    greedy = model.generate(prompt, do_sample=False, **settings)
    torch.manual_seed(5)
    drawn = model.generate(prompt, do_sample=True, top_k=20, **settings)
check("lengths", greedy.shape == (2, 36) and drawn.shape == (2, 36))
print("greedy", bits(greedy))
print("sampled", bits(drawn))
with torch.no_grad(), torch.autocast("cuda", dtype=torch.bfloat16):
    logits = model(prompt).logits
print(f"bfloat16 logits {logits.float().abs().mean().item():.3f}")
