"""Makes the small distributed checkpoints under tests/reference/dcp: one of each shape that PyTorch programs write.

    torchrun --nproc-per-node 2 tests/interop/dcp_shapes.py tests/reference/dcp

Each holds the same tiny Llama after two steps of AdamW. `expected.safetensors` has what it must be read as: every weight
and both moments under Hugging Face names. torch and accelerate write theirs; torchtitan's keys are made as its saver
makes them (components/checkpointer, and the Llama StateDictAdapter, whose query and key rows are in another order)."""

import json
import os
import sys
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from accelerate import FullyShardedDataParallelPlugin, PartialState
from accelerate.utils import save_fsdp_model, save_fsdp_optimizer
from safetensors.torch import save_file
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from transformers import LlamaConfig, LlamaForCausalLM

HEADS, KV_HEADS, HEAD = 2, 1, 8


def llama(tied):
    torch.manual_seed(7)
    config = LlamaConfig(vocab_size=11, hidden_size=8, intermediate_size=12, num_hidden_layers=1, num_attention_heads=HEADS,
                         num_key_value_heads=KV_HEADS, head_dim=HEAD, tie_word_embeddings=tied, max_position_embeddings=64)
    return LlamaForCausalLM(config)


def titan_name(name):
    for ours, theirs in [("model.embed_tokens", "tok_embeddings"), ("model.layers", "layers"), ("self_attn.q_proj", "attention.qkv_linear.wq"),
                         ("self_attn.k_proj", "attention.qkv_linear.wk"), ("self_attn.v_proj", "attention.qkv_linear.wv"),
                         ("self_attn.o_proj", "attention.wo"), ("mlp.gate_proj", "feed_forward.w1"), ("mlp.up_proj", "feed_forward.w3"),
                         ("mlp.down_proj", "feed_forward.w2"), ("input_layernorm", "attention_norm"),
                         ("post_attention_layernorm", "ffn_norm"), ("model.norm", "norm")]:
        name = name.replace(ours, theirs)
    return name


def titan_rows(name, w):
    """torchtitan's _reverse_permute."""
    heads = HEADS if "q_proj" in name else KV_HEADS if "k_proj" in name else 0
    if not heads:
        return w
    return w.view(heads, 2, w.shape[0] // heads // 2, w.shape[1]).transpose(1, 2).reshape(w.shape).contiguous()


class Titan(torch.nn.Module):
    """Parameters under torchtitan's names."""

    def __init__(self, weights):
        super().__init__()
        for name, weight in weights.items():
            *path, last = name.split(".")
            module = self
            for part in path:
                if not hasattr(module, part):
                    module.add_module(part, torch.nn.Module())
                module = getattr(module, part)
            setattr(module, last, torch.nn.Parameter(weight.clone()))


def grads(model):
    tokens = torch.tensor([[1, 2, 3, 4, 5, 9]])
    model.zero_grad()
    model(tokens, labels=tokens).loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def train(model, optimizer):
    """Two steps, and what they must be read as, computed without sharding."""
    for _ in range(2):
        grads(model)
        optimizer.step()
    out = {}
    for name, p in model.named_parameters():
        state = optimizer.state[p]
        out[name], out[name + ".exp_avg"], out[name + ".exp_avg_sq"] = p.detach(), state["exp_avg"], state["exp_avg_sq"]
    return {name: t.clone().contiguous() for name, t in out.items()}


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)


def sharded(model):
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    return model


def hugging_face(tied):
    model = sharded(llama(tied))
    optimizer = adamw(model.parameters())
    for _ in range(2):
        grads(model)
        optimizer.step()
    return model, optimizer


def titan():
    model = llama(False)
    reference = adamw(model.parameters())
    theirs = Titan({titan_name(n): titan_rows(n, p.detach()) for n, p in model.named_parameters()})
    fully_shard(theirs)
    optimizer = adamw(theirs.parameters())
    for _ in range(2):
        full = grads(model)
        parameters = dict(theirs.named_parameters())
        for name, grad in full.items():
            p = parameters[titan_name(name)]
            rows = titan_rows(name, grad)
            share = -(-rows.shape[0] // dist.get_world_size())
            local = rows[dist.get_rank() * share:(dist.get_rank() + 1) * share]
            p.grad = torch.distributed.tensor.DTensor.from_local(local, p.device_mesh, p.placements, shape=p.shape, stride=p.stride())
        optimizer.step()
        reference.step()
    return theirs, optimizer


def with_accelerate(folder):
    """By accelerate's own savers; its Accelerator itself refuses FSDP on CPUs."""
    rank = dist.get_rank()
    accelerator = SimpleNamespace(process_index=rank, is_main_process=rank == 0, num_processes=dist.get_world_size(),
                                  is_fsdp2=True, wait_for_everyone=dist.barrier)
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type="SHARDED_STATE_DICT")
    model, optimizer = hugging_face(False)
    save_fsdp_model(plugin, accelerator, model, folder)
    save_fsdp_optimizer(plugin, accelerator, optimizer, model, folder)


def boxes():
    """Columns on each rank, several dtypes, and things that are no tensors."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    columns = torch.arange(42, dtype=torch.bfloat16).reshape(6, 7)
    middle = torch.arange(30, dtype=torch.int64).reshape(2, 5, 3)
    return {
        "columns": distribute_tensor(columns, mesh, [Shard(1)]),
        "middle": distribute_tensor(middle, mesh, [Shard(1)]),
        "few": distribute_tensor(torch.arange(1.0), mesh, [Shard(0)]),
        "eight": torch.arange(5.0).to(torch.float8_e4m3fn),
        "complex": torch.ones(2, dtype=torch.complex64),
        "turned": torch.arange(6.0).reshape(2, 3).t(),
        "number": 12,
        "nested": {"list": [1.5, {"deep": 2.5}]},
    }


def save(state, folder):
    dcp.save(state, checkpoint_id=folder)


def main():
    out = sys.argv[1]
    dist.init_process_group("gloo")
    PartialState(cpu=True)
    rank = dist.get_rank()
    for tied, name in [(False, "expected"), (True, "expected-tied")]:
        model = llama(tied)
        expected = train(model, adamw(model.parameters()))
        if rank == 0:
            os.makedirs(out, exist_ok=True)
            save_file(expected, f"{out}/{name}.safetensors")
            config = json.loads(model.config.to_json_string())
            with open(f"{out}/{name}-config.json", "w") as file:
                json.dump(config, file, indent=1)
    model, optimizer = hugging_face(True)
    weights, state = get_state_dict(model, optimizer)
    save({"app": {"model": weights, "optim": state}}, f"{out}/app-tied")
    save(boxes(), f"{out}/boxes")
    with_accelerate(f"{out}/accelerate")
    model, optimizer = titan()
    flat = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True))
    train_state = {"step": torch.tensor(2, dtype=torch.int32), "ntokens_seen": torch.tensor(24)}
    save({**model.state_dict(), "optimizer": flat, "train_state": train_state, "lr_scheduler": {"last_epoch": 2}}, f"{out}/torchtitan")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
