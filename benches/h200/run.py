#!/usr/bin/env python3
"""Ours against PyTorch FSDP2 + compile on the same GPU, in one run: a table in Markdown.

    benches/h200/run.py [--shardloom PATH] [--cases NAME,...] [--kernels] [--rounds N] [--out FILE]

For each case ours runs before and after PyTorch's, so that a GPU that warms up or slows down does so for both; the
mean of ours stands in the table, with both numbers beside it. --kernels adds ours kernel by kernel: time, rate, and
that as a share of a bare product or copy. Needs an NVIDIA GPU; PyTorch and transformers for PyTorch's side.
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


def ours(args, case, kernels=False):
    size, seq, rows, master, recompute = CASES[case]
    command = [args.shardloom, "bench", "step", "--device", "cuda", "--size", size, "--seq", seq, "--rows", rows,
               "--compute", "bf16", "--master", master, "--steps", args.steps, "--warm-up", 3]
    command += ["--set", "recompute.mode=full"] if recompute else []
    command += ["--kernels"] if kernels else []
    return last_json([str(part) for part in command])


def theirs(args, case):
    size, seq, rows, master, recompute = CASES[case]
    command = [args.python, HERE / "torch_fsdp2.py", "--size", size, "--seq", seq, "--rows", rows,
               "--master", master, "--steps", args.steps]
    command += ["--recompute"] if recompute else []
    return last_json([str(part) for part in command])


def gib(report):
    return f"{report['peak_bytes'] / 2**30:.1f} GiB" if report else "—"


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
    parser.add_argument("--rounds", type=int, default=1, help="PyTorch runs of each case, between ours")
    parser.add_argument("--kernels", action="store_true")
    parser.add_argument("--without-torch", action="store_true")
    parser.add_argument("--out", help="also write the table here")
    args = parser.parse_args()
    rows, tables = [], []
    for case in args.cases.split(","):
        our_reports, their_reports = [ours(args, case)[0]], []
        for _ in range(0 if args.without_torch else args.rounds):
            their_reports.append(theirs(args, case)[0])
            our_reports.append(ours(args, case)[0])
        our_reports, their_reports = [list(filter(None, reports)) for reports in (our_reports, their_reports)]
        mean = lambda reports: sum(report["tokens_per_s"] for report in reports) / len(reports)
        each = lambda reports: ", ".join(f"{report['tokens_per_s']:,.0f}" for report in reports)
        us = mean(our_reports) if our_reports else float("nan")
        them = mean(their_reports) if their_reports else float("nan")
        rows.append(f"| {case} | {us:,.0f} ({each(our_reports)}) | {each(their_reports) or '—'} | {us / them:.3f} "
                    f"| {gib(our_reports and our_reports[-1])} | {gib(their_reports and their_reports[-1])} |")
        print(rows[-1], flush=True)
        if args.kernels:
            _, text = ours(args, case, kernels=True)
            tables.append(f"\n{case}\n\n```\n{text.rsplit(chr(10) + '{', 1)[0]}\n```\n")
    head = ["| case | ours, tokens/s | PyTorch | ratio | our peak | PyTorch's |", "|---|---|---|---|---|---|"]
    table = "\n".join([versions(args), "", *head, *rows]) + "\n" + "".join(tables)
    print("\n" + table)
    if args.out:
        pathlib.Path(args.out).write_text(table)


if __name__ == "__main__":
    main()
