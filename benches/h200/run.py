#!/usr/bin/env python3
"""Ours against PyTorch FSDP2 + compile on the same GPU, in one run: a table in Markdown.

    benches/h200/run.py [--shardloom PATH] [--cases NAME,...] [--rounds N] [--out FILE]

Of each case ours and PyTorch's run in turn, `--rounds` times, so that a GPU that warms up or slows down does so for
both. Ours is also told kernel by kernel: time, rate, and that as a share of a bare product or copy (the marks between
kernels cost it some microseconds each). Needs an NVIDIA GPU; PyTorch and transformers for PyTorch's side.
"""
import argparse
import datetime
import json
import pathlib
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parent

# name: size, tokens of a row, rows, master dtype, full recompute
CASES = {
    "8b-4096x2": ("8b", 4096, 2, "bf16", False),
    "8b-8192x1": ("8b", 8192, 1, "bf16", False),
    "8b-4096x4-recompute": ("8b", 4096, 4, "bf16", True),
    "1b-4096x4": ("1b", 4096, 4, "f32", False),
}


def last_json(command):
    """The last line of a command's output that is a JSON object; None, with the reason on standard error."""
    done = subprocess.run(command, capture_output=True, text=True)
    for line in reversed(done.stdout.splitlines()):
        if line.startswith("{"):
            return json.loads(line), done.stdout
    print(f"{' '.join(map(str, command))}: status {done.returncode}\n{done.stderr[-2000:]}", file=sys.stderr)
    return None, done.stdout


def ours(args, case):
    size, seq, rows, master, recompute = CASES[case]
    command = [args.shardloom, "bench", "step", "--device", "cuda", "--size", size, "--seq", seq, "--rows", rows,
               "--compute", "bf16", "--master", master, "--steps", args.steps, "--warm-up", args.warm_up, "--kernels"]
    command += ["--set", "recompute.mode=full"] if recompute else []
    return last_json([str(part) for part in command])


def theirs(args, case):
    size, seq, rows, master, recompute = CASES[case]
    command = [args.python, HERE / "torch_fsdp2.py", "--size", size, "--seq", seq, "--rows", rows,
               "--master", master, "--steps", args.steps, "--warm-up", args.warm_up]
    command += ["--recompute"] if recompute else []
    return last_json([str(part) for part in command])


def gib(reports):
    return f"{reports[-1]['peak_bytes'] / 2**30:.1f} GiB" if reports else "—"


def versions(args):
    gpu = subprocess.run(["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"],
                         capture_output=True, text=True).stdout.strip()
    devices, _ = last_json([args.shardloom, "devices", "--json"])
    found = [f"{lib['name']} {lib.get('version', 'missing')}" for lib in (devices or {}).get("libraries", [])]
    return f"{datetime.date.today()}, {gpu}, {', '.join(found)}"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shardloom", default="target/release/shardloom")
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--cases", default=",".join(CASES), help="of " + ", ".join(CASES))
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--warm-up", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--without-torch", action="store_true")
    parser.add_argument("--out", help="also write the table here")
    args = parser.parse_args()
    rows, tables = [], []
    for case in args.cases.split(","):
        us, them, text = [], [], ""
        for _ in range(args.rounds):
            report, text = ours(args, case)
            us.append(report)
            them.append(None if args.without_torch else theirs(args, case)[0])
        us, them = [[report for report in reports if report] for reports in (us, them)]
        mean = lambda reports: sum(report["tokens_per_s"] for report in reports) / max(len(reports), 1)
        each = lambda reports: ", ".join(f"{report['tokens_per_s']:,.0f}" for report in reports) or "—"
        ratio = f"{mean(us) / mean(them):.3f}" if us and them else "—"
        rows.append(f"| {case} | {each(us)} | {each(them)} | {ratio} | {gib(us)} | {gib(them)} |")
        tables.append(f"\n{case}\n\n```\n{text.rsplit(chr(10) + '{', 1)[0]}\n```\n")
        print(rows[-1], flush=True)
        if args.out:
            pathlib.Path(args.out).write_text("\n".join(rows) + "\n" + "".join(tables))
    head = ["| case | ours, tokens/s | PyTorch | ratio | our peak | PyTorch's |", "|---|---|---|---|---|---|"]
    table = "\n".join([versions(args), "", *head, *rows]) + "\n" + "".join(tables)
    print("\n" + table)
    if args.out:
        pathlib.Path(args.out).write_text(table)


if __name__ == "__main__":
    main()
