"""The PyTorch side of tests/interop/dcp.sh: real FSDP2 and real transformers on a reference model.

    torchrun --nproc-per-node 2 dcp.py go-on REFERENCE CHECKPOINT FIRST LAST [SAVE_TO]
        loads weights and AdamW's state with dcp.load, trains steps FIRST to LAST, prints their losses as JSON, and
        saves where it is told to
    python dcp.py pretrained REFERENCE CHECKPOINT STEP
        loads a native checkpoint with from_pretrained; prints the loss of STEP's batch and a digest of its logits
    python dcp.py close A B BOUND
        whether two JSON lists of numbers are within BOUND of each other, relatively"""

import json
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from transformers import AutoConfig, AutoModelForCausalLM


def batch(reference, step):
    io = load_file(f"{reference}/io.safetensors")
    return io["input_ids"][step - 1].long(), io["labels"][step - 1].long()


def loss_sum(model, ids, labels):
    logits = model(input_ids=ids).logits.float()
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")


def go_on(reference, checkpoint, first, last, save_to=None):
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1234)  # Other weights than the checkpoint's, so that loading is seen.
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(reference), attn_implementation="eager").float()
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5, betas=(0.1, 0.2), weight_decay=0.7)
    weights, state = get_state_dict(model, optimizer)
    template = {"model": weights, "optimizer": state}
    dcp.load(template, checkpoint_id=checkpoint)
    set_state_dict(model, optimizer, model_state_dict=template["model"], optim_state_dict=template["optimizer"])
    group = optimizer.param_groups[0]
    assert (group["lr"], tuple(group["betas"]), group["weight_decay"]) == (1e-3, (0.9, 0.95), 0.1), group
    losses = []
    for step in range(first, last + 1):
        ids, labels = batch(reference, step)
        count = (labels != -100).sum()
        rows = ids.shape[0] // ranks
        mine = slice(rank * rows, (rank + 1) * rows)
        loss = loss_sum(model, ids[mine], labels[mine]) / count
        (loss * ranks).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(total.item())
    if save_to:
        weights, state = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optimizer": state}, checkpoint_id=save_to)
    if rank == 0:
        print(json.dumps(losses))
    dist.destroy_process_group()


def pretrained(reference, checkpoint, step):
    model, info = AutoModelForCausalLM.from_pretrained(checkpoint, output_loading_info=True, attn_implementation="eager", dtype=torch.float32)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    ids, labels = batch(reference, step)
    with torch.no_grad():
        print(json.dumps([(loss_sum(model, ids, labels) / (labels != -100).sum()).item()]))


def close(a, b, bound):
    a, b = json.loads(a), json.loads(b)
    assert len(a) == len(b) > 0, (a, b)
    off = max(abs(x / y - 1) for x, y in zip(a, b))
    print(f"  within {off:.1e} (bound {bound})")
    assert off <= float(bound), (a, b)


def logits(reference, checkpoint, weights):
    """Logits of a native checkpoint against those of a safetensors file that PyTorch wrote."""
    ours = AutoModelForCausalLM.from_pretrained(checkpoint, attn_implementation="eager", dtype=torch.float32)
    theirs = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(reference), attn_implementation="eager").float()
    theirs.load_state_dict(load_file(weights), strict=False)
    ids, _ = batch(reference, 1)
    with torch.no_grad():
        a, b = ours(input_ids=ids).logits, theirs(input_ids=ids).logits
    off = ((a - b).abs().max() / b.abs().max()).item()
    print(f"  within {off:.1e} of the largest logit (bound 1e-4)")
    assert off <= 1e-4


if __name__ == "__main__":
    command, *rest = sys.argv[1:]
    if command == "go-on":
        go_on(rest[0], rest[1], int(rest[2]), int(rest[3]), *rest[4:])
    elif command == "pretrained":
        pretrained(rest[0], rest[1], int(rest[2]))
    elif command == "logits":
        logits(*rest)
    else:
        close(*rest)
