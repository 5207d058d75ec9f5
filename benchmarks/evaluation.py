"""Throughput of evaluation against one prompt at a time, with equal greedy tokens: `python benchmarks/evaluation.py MODEL GSM8K_JSONL`.

All prompts go through `tasks.core.evaluation.generate`; a subset, spread over the lengths, through transformers' `generate` one by one, in turns with batches of ours,
and its time is scaled to all prompts by the tokens produced. Exit code 1 where a token differs or the ratio is below --least.
"""

import argparse
import json
import statistics
import sys
import time
from typing import Any

from configs.schema import ComputeSection, ModelSection
from tasks.core.evaluation.generate import Counts, generate, until_stop
from tasks.core.model import loading
from tasks.core.model.prompts import render_prompt


def main() -> int:
    """Prints what was measured; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("questions")
    parser.add_argument("--prompts", type=int, default=256)
    parser.add_argument("--alone", type=int, default=16, help="prompts that are generated one by one")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--threads", type=int, default=0, help="0: torch's own choice")
    parser.add_argument("--least", type=float, default=8.0)
    given = parser.parse_args()
    import torch

    if given.threads:
        torch.set_num_threads(given.threads)
    section = ModelSection(name=given.model)
    tokenizer = loading.load_tokenizer(given.model, section)
    model = loading.load_policy(given.model, section, ComputeSection(device="auto"), for_training=False)
    with open(given.questions, encoding="utf-8") as file:
        questions = [json.loads(line)["question"] for line in file][: given.prompts]
    prompts = tokenizer([render_prompt(tokenizer, [{"role": "user", "content": q}], {}) for q in questions])[
        "input_ids"
    ]
    stops, pad = loading.eos_ids(model, tokenizer), tokenizer.pad_token_id
    by_length = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    chosen = by_length[:: max(1, len(prompts) // given.alone)][: given.alone]
    one_by_one(model, prompts[:1], stops, pad, 4)  # what only the first call pays
    batches = [by_length[start : start + given.batch_size] for start in range(0, len(by_length), given.batch_size)]
    ours: dict[int, list[int]] = {}
    theirs: dict[int, list[int]] = {}
    clock = {"ours": 0.0, "theirs": 0.0, "ours cpu": 0.0, "theirs cpu": 0.0}
    counts, share = Counts(), -(-len(chosen) // len(batches))
    for number, batch in enumerate(batches):
        with timed(clock, "theirs"):
            subset = chosen[number * share : (number + 1) * share]
            theirs |= dict(
                zip(subset, one_by_one(model, [prompts[i] for i in subset], stops, pad, given.tokens), strict=True)
            )
        with timed(clock, "ours"):
            found = generate(
                model, [prompts[i] for i in batch], stops, pad, given.tokens, given.batch_size, counts=counts
            )
        ours |= dict(zip(batch, found, strict=True))
        print(
            f"{len(ours)} of {len(prompts)} prompts, {clock['ours']:.0f} s in batches; {len(theirs)} alone, {clock['theirs']:.0f} s",
            file=sys.stderr,
            flush=True,
        )
    tokens = sum(map(len, ours.values()))
    scale = len(prompts) / len(theirs)
    differing = [i for i in theirs if theirs[i] != ours[i]]
    print(
        f"{len(prompts)} prompts of {statistics.mean(map(len, prompts)):.0f} tokens on average, {tokens} tokens produced, {torch.get_num_threads()} threads"
    )
    for kind in ("", " cpu"):
        what = "seconds of processor time" if kind else "seconds"
        one, other = clock["theirs" + kind] * scale, clock["ours" + kind]
        print(
            f"{what}: one at a time {one:.0f} ({scale:g} x those measured), in batches {other:.0f}: {one / other:.2f} times"
        )
    print(
        f"{len(differing)} of {len(theirs)} completions differ; {counts.alone} of {len(prompts)} were close calls and were done once more, alone"
    )
    return 1 if differing or clock["theirs"] * scale / clock["ours"] < given.least else 0


class timed:
    """Adds what a block takes to a clock, in seconds of wall and of processor time."""

    def __init__(self, clock: dict[str, float], name: str):
        self.clock, self.name = clock, name

    def __enter__(self) -> None:
        self.began = time.perf_counter(), time.process_time()

    def __exit__(self, *error: Any) -> None:
        self.clock[self.name] += time.perf_counter() - self.began[0]
        self.clock[f"{self.name} cpu"] += time.process_time() - self.began[1]


def one_by_one(model: Any, prompts: list[list[int]], stops: list[int], pad: int, tokens: int) -> list[list[int]]:
    """Greedy completions by transformers' own `generate`, a prompt at a time."""
    import torch
    from transformers import GenerationConfig

    config = GenerationConfig(max_new_tokens=tokens, eos_token_id=stops, pad_token_id=pad, do_sample=False)
    found = []
    for prompt in prompts:
        ids = torch.tensor([prompt], device=model.device)
        with torch.inference_mode():
            produced = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), generation_config=config)
        found.append(until_stop(produced[0, len(prompt) :].tolist(), stops))
    return found


if __name__ == "__main__":
    sys.exit(main())
