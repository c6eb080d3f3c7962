"""PyTorch's weights after the 12 steps of `clip1` computed in f64, for the weights whose f32 result is mostly rounding.

usage: after12_f64.py FOLDER PATTERN     writes FOLDER/after12-f64.safetensors (needs torch and transformers)
"""
import sys

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

folder, pattern = sys.argv[1:]
data = load_file(f"{folder}/io.safetensors")
model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float64).train()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
for ids, labels in zip(data["input_ids"], data["labels"]):
    optimizer.zero_grad()
    logits = model(input_ids=ids, use_cache=False).logits
    F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
kept = {name: weight.detach() for name, weight in model.named_parameters() if pattern in name}
save_file(kept, f"{folder}/after12-f64.safetensors", metadata={"format": "pt"})
