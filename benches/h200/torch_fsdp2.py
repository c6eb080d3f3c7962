"""PyTorch FSDP2 on a Llama of random weights, measured as `shardloom bench step` measures.

One JSON line: tokens/s and the time of a step (median), peak memory. Clipping and fused AdamW are part of a step.
On GPUs every layer is compiled on its own, which is how FSDP2 is meant to be compiled, and so is the loss; on CPUs
nothing is, and each rank has one thread. Ranks are told who they are by RANK, WORLD_SIZE and MASTER_ADDR.

    python torch_fsdp2.py --size 8b --seq 4096 --rows 2 --master bf16 [--recompute]
    python torch_fsdp2.py --device cpu --size 60m --seq 256 --rows 4 --compute f32
"""
import argparse
import json
import os
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

# hidden, intermediate, layers, heads, key-value heads, vocabulary: as in crates/shardloom/src/bench.rs
SIZES = {
    "tiny": (256, 688, 4, 8, 4, 4096),
    "60m": (512, 1376, 8, 8, 8, 32000),
    "1b": (2048, 8192, 16, 32, 8, 128256),
    "3b": (3072, 8192, 28, 24, 8, 128256),
    "8b": (4096, 14336, 32, 32, 8, 128256),
}
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}


class WithLoss(torch.nn.Module):
    """The model and its loss as one module, so that the head is gathered for both."""

    def __init__(self, model, loss):
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, ids, labels):
        hidden = self.model.model(input_ids=ids, use_cache=False).last_hidden_state
        return self.loss(self.model.lm_head(hidden), labels)


def cross_entropy(logits, labels):
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def build(args, mesh):
    hidden, intermediate, layers, heads, kv_heads, vocab = SIZES[args.size]
    config = LlamaConfig(
        hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=kv_heads, vocab_size=vocab, max_position_embeddings=args.seq, rope_theta=500000.0,
        rms_norm_eps=1e-6, tie_word_embeddings=False, attn_implementation="sdpa",
    )
    master = DTYPES[args.master]
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(master)
    if args.recompute:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    compiles = args.device == "cuda"
    whole = WithLoss(model, torch.compile(cross_entropy) if compiles else cross_entropy)
    precision = MixedPrecisionPolicy(param_dtype=DTYPES[args.compute], reduce_dtype=master)
    for layer in model.model.layers:
        if compiles:
            layer.compile()
        fully_shard(layer, mesh=mesh, mp_policy=precision)
    fully_shard(whole, mesh=mesh, mp_policy=precision)
    whole.to_empty(device=args.device)
    fill(whole, config, args.device)
    return whole.train(), config


@torch.no_grad()
def fill(model, config, device):
    for name, weight in model.named_parameters():
        local = weight.to_local()
        local.fill_(1.0) if "norm" in name else local.normal_(0, 0.02)
    # Buffers made on the meta device are empty as well.
    exponent = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device=device) / config.head_dim
    for name, buffer in model.named_buffers():
        if "inv_freq" in name:
            buffer.copy_(1.0 / 500000.0**exponent)


def wait(args):
    """Until this rank's device, and then all ranks, are done."""
    if args.device == "cuda":
        torch.cuda.synchronize()
    dist.barrier()


def measure(args, model, config):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.01, fused=True)
    generator = torch.Generator().manual_seed(1)
    times, losses = [], []
    for step in range(args.warm_up + args.steps):
        tokens = torch.randint(0, config.vocab_size, (args.rows, args.seq + 1), generator=generator)
        tokens = tokens.to(args.device)
        wait(args)
        start = time.perf_counter()
        loss = model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        wait(args)
        if step >= args.warm_up:
            times.append(time.perf_counter() - start)
        losses.append(loss.item())
    return sorted(times)[len(times) // 2], losses


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=SIZES, default="1b")
    parser.add_argument("--seq", type=int, default=4096)
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--compute", choices=DTYPES, default="bf16")
    parser.add_argument("--master", choices=DTYPES, default="f32")
    parser.add_argument("--recompute", action="store_true")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--warm-up", type=int, default=3)
    args = parser.parse_args()
    for name, value in [("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "29511"), ("RANK", "0"), ("WORLD_SIZE", "1")]:
        os.environ.setdefault(name, value)
    on_gpu = args.device == "cuda"
    if on_gpu:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    else:
        torch.set_num_threads(1)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    ranks = dist.get_world_size()
    torch.manual_seed(0)
    model, config = build(args, init_device_mesh(args.device, (ranks,)))
    seconds, losses = measure(args, model, config)
    if dist.get_rank() == 0:
        print(json.dumps(report(args, ranks, seconds, losses)), flush=True)
    dist.destroy_process_group()


def report(args, ranks, seconds, losses):
    return {
        "peer": f"torch {torch.__version__}", "size": args.size, "seq": args.seq, "rows": args.rows,
        "compute": args.compute, "master": args.master, "recompute": args.recompute,
        "cudnn": torch.backends.cudnn.version(), "step_ms": seconds * 1e3,
        "tokens_per_s": ranks * args.rows * args.seq / seconds, "ranks": ranks,
        "peak_bytes": torch.cuda.max_memory_allocated() if args.device == "cuda" else None,
        "first_loss": losses[0], "last_loss": losses[-1],
    }


if __name__ == "__main__":
    main()
