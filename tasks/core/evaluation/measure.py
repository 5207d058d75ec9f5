"""Measures a model on held-out prompts: greedy completions, scored as in training; sampled ones for pass@k and maj@k; and its KL from a reference."""

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from configs.errors import DataError
from configs.schema import ComputeSection, DataSection, EvaluationSection, ModelSection, RewardConfig
from tasks.core.evaluation import harness, kl, metrics, sets
from tasks.core.evaluation.generate import generate
from tasks.core.model import loading, prompt_lengths
from tasks.core.model.prompts import render_prompt
from tasks.core.scoring import answers, error_classes, rewards
from tasks.core.storage.jsonl import read_rows, sample

# Prompts, in batches, whose completions are in memory together.
WINDOW = 16


@dataclass
class Actor:
    """A model with what generating and scoring needs; `seed` decides everything random."""

    model: Any
    tokenizer: Any
    stops: list[int]
    reward: rewards.Reward
    section: EvaluationSection
    loading: ModelSection
    seed: int

    def fitting(self, rows: list[dict[str, Any]], data: Path) -> list[dict[str, Any]]:
        """The rows whose prompts leave room for a completion, by the policy of the data. Raises DataError where that refuses."""
        lower = "evaluation.max_new_tokens (or grpo.max_new_tokens)"
        return prompt_lengths.fitting(
            rows,
            self.tokenizer,
            self.loading,
            prompt_lengths.takes(self.model),
            self.section.max_new_tokens,
            prompt_lengths.policy(data),
            lower,
        )

    def prompts(self, rows: list[dict[str, Any]]) -> tuple[list[str], list[list[int]]]:
        """The prompts' texts and token ids."""
        texts = [render_prompt(self.tokenizer, row["prompt"], self.loading.chat_template_kwargs) for row in rows]
        return texts, self.tokenizer(texts)["input_ids"]

    def complete(
        self, ids: list[list[int]], progress: Callable[..., None] = lambda **event: None, **sampling: Any
    ) -> list[list[int]]:
        """Completions, as `generate` gives them."""
        settings = (self.stops, self.tokenizer.pad_token_id, self.section.max_new_tokens, self.section.batch_size)
        return generate(self.model, ids, *settings, progress=progress, **sampling)


def measure(
    section: EvaluationSection,
    reward_type: str,
    reward_config: RewardConfig,
    model: ModelSection,
    compute: ComputeSection,
    seed: int,
    policy: str | Path,
    reference: str | Path | None,
    data: Path,
    out: Path,
    emit: Callable[..., None],
    source: DataSection | None = None,
) -> dict[str, Any]:
    """Writes `metrics.json` and `completions.jsonl` (in the order of the held-out file) to `out` and returns the metrics.

    `policy` and `reference` are model folders, `data` is the data artifact, `source` says which columns the files of `evaluation.sets` have. Metrics:
    those of `metrics.summary` and, with a reference, kl and kl_sequence (see `measure_kl`). A further set has a folder `sets/<name>` with its
    completions, and its metrics are `<name>/<metric>`. The same arguments give the same bytes on the same machine.
    Raises DataError for a set without rows, and what loading a model raises.
    """
    tokenizer = loading.load_tokenizer(policy, model)
    actor_model = loading.load_policy(policy, model, compute, for_training=False)
    reward = rewards.build(reward_type, reward_config)
    actor = Actor(actor_model, tokenizer, loading.eos_ids(actor_model, tokenizer), reward, section, model, seed)
    rows = actor.fitting(held_out(section, data, seed), data)
    found = measure_set(actor, rows, out, emit)
    for name, one in section.sets.items():
        if one.task is not None:
            metrics.join(
                found,
                name,
                harness.evaluate(one, actor_model, tokenizer, section.batch_size, seed, out / "sets" / name),
            )
        else:
            further = actor.fitting(sets.rows(name, one, source or DataSection(), data, seed), data)
            metrics.join(found, name, measure_set(actor, further, out / "sets" / name, emit))
    if reference is not None:
        other = loading.load_policy(reference, model, compute, for_training=False)
        chosen = sample(rows, min(section.kl_samples, len(rows)), seed)
        found |= measure_kl(actor, other, chosen)
    (out / "metrics.json").write_text(json.dumps(found, sort_keys=True, indent=2, allow_nan=False) + "\n")
    return found


def held_out(section: EvaluationSection, data: Path, seed: int) -> list[dict[str, Any]]:
    """The rows to measure on, in the order of their file; `max_samples` of them are chosen by the seed alone, so that all models see the same."""
    rows = read_rows(data / f"{section.split}.jsonl")
    if not rows:
        raise DataError(
            f"evaluation.split is {section.split}, which holds no prompts: raise data.{section.split}_size or choose the other split"
        )
    return sets.chosen(rows, section.max_samples, seed)


def measure_set(actor: Actor, rows: list[dict[str, Any]], out: Path, emit: Callable[..., None]) -> dict[str, Any]:
    """Writes `completions.jsonl`, and `sampled.jsonl` where there are samples, to `out`, and returns the metrics of one set.

    Completions are scored and written a window at a time: of what went by, a few numbers per prompt stay in memory, whatever `evaluation.samples` is.
    """
    out.mkdir(parents=True, exist_ok=True)
    columns = metrics.Columns()
    samples = actor.section.samples
    total, done = len(rows) * (1 + samples), 0

    def progress(**event: Any) -> None:
        emit(event=event["event"], done=done + event["done"], total=total)

    with (out / "completions.jsonl").open("w", encoding="utf-8", newline="\n") as file:
        for window in _windows(rows, WINDOW * actor.section.batch_size):
            texts, ids = actor.prompts(window)
            scored = score(window, texts, actor.complete(ids, progress), actor.stops, actor.tokenizer, actor.reward)
            columns.add(scored)
            file.writelines(_line({k: v for k, v in row.items() if k != "components"}) for row in scored)
            done += len(window)
    if samples:
        with (out / "sampled.jsonl").open("w", encoding="utf-8", newline="\n") as file:
            for window in _windows(rows, max(1, WINDOW * actor.section.batch_size // samples)):
                for row in count_votes(actor, window, progress):
                    columns.add_samples(row, actor.section.k)
                    file.write(_line(row))
                done += len(window) * samples
    return metrics.summary(columns)


def _windows(rows: list[Any], size: int) -> Iterator[list[Any]]:
    for start in range(0, len(rows), size):
        yield rows[start : start + size]


def _line(row: dict[str, Any]) -> str:
    return json.dumps(row, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n"


def score(
    rows: list[dict], prompts: list[str], completions: list[list[int]], stops: list[int], tokenizer: Any, reward: Any
) -> list[dict[str, Any]]:
    """One row per prompt, as in completions.jsonl, with its reward's `components` besides."""
    texts = tokenizer.batch_decode(completions, skip_special_tokens=True)
    golds, lengths = [row["gold"] for row in rows], [len(ids) for ids in completions]
    further = {name for row in rows for name in row if name not in ("prompt", "gold")}
    columns = {
        "prompts": prompts,
        "completion_ids": completions,
        **{name: [row.get(name) for row in rows] for name in sorted(further)},
    }
    totals = reward.score(texts, golds, lengths, columns)
    scored = []
    for row, prompt, text, ids, points in zip(rows, prompts, texts, completions, totals, strict=True):
        answer = reward.answer(text)
        correct, truncated = answer is not None and answers.same_answer(answer, row["gold"]), ids[-1] not in stops
        scored.append(
            {
                "id": row["id"],
                "prompt": prompt,
                "gold": row["gold"],
                "completion": text,
                "answer": answer,
                "correct": correct,
                "formatted": reward.is_formatted(text),
                "reward": points["total"],
                "length": len(ids),
                "truncated": truncated,
                "error": error_classes.error_class(text, answer, row["gold"], correct, truncated),
                "components": {name: value for name, value in points.items() if name != "total"},
                **({"category": str(row["category"])} if row.get("category") is not None else {}),
            }
        )
    return scored


def count_votes(
    actor: Actor, rows: list[dict[str, Any]], progress: Callable[..., None] = lambda **event: None
) -> list[dict[str, Any]]:
    """Per prompt, of `evaluation.samples` completions: how many are right, and how many give each answer; answers that are equal are one.

    A row is {"id", "samples", "correct", "silent" (without an answer), "answers": [{"answer", "votes", "correct"}, ...] (the most frequent first)}.
    """
    section, repeat = actor.section, actor.section.samples
    _, ids = actor.prompts(rows)
    seeds = [seed_of(actor.seed, row["id"], number) for row in rows for number in range(repeat)]
    found = actor.complete(
        [one for one in ids for _ in range(repeat)], progress, temperature=section.sample_temperature, seeds=seeds
    )
    texts = actor.tokenizer.batch_decode(found, skip_special_tokens=True)
    return [
        tally(row, [actor.reward.answer(text) for text in texts[i * repeat : (i + 1) * repeat]])
        for i, row in enumerate(rows)
    ]


def tally(row: dict[str, Any], given: list[str | None]) -> dict[str, Any]:
    """The row of `count_votes` for the answers that one prompt got."""
    stated = [answer for answer in given if answer is not None]
    counted: list[dict[str, Any]] = []
    for answer in stated:
        correct = answers.same_answer(answer, row["gold"])
        same = next(
            (c for c in counted if c["correct"] == correct and (correct or answers.same_answer(answer, c["answer"]))),
            None,
        )
        if same is None:
            counted.append(same := {"answer": answer, "votes": 0, "correct": correct})
        same["votes"] += 1
    counted.sort(key=lambda c: -c["votes"])
    right = sum(c["votes"] for c in counted if c["correct"])
    return {
        "id": row["id"],
        "samples": len(given),
        "correct": right,
        "silent": len(given) - len(stated),
        "answers": counted,
    }


def seed_of(seed: int, *parts: Any) -> int:
    """A seed of its own for each completion: what is sampled does not depend on what else is."""
    return int.from_bytes(hashlib.sha256(json.dumps([seed, *parts]).encode()).digest()[:8]) >> 1


def measure_kl(actor: Actor, reference: Any, rows: list[dict[str, Any]]) -> dict[str, float]:
    """KL(policy || reference) in nats, on one completion per prompt, sampled from the policy at `kl_temperature`.

    `kl` is the full-vocabulary divergence at each position, averaged over tokens; `kl_sequence` its sum over a completion, averaged over
    completions. The temperature only chooses the completions: the two distributions compared are the models' own, untempered.
    """
    _, ids = actor.prompts(rows)
    seeds = [seed_of(actor.seed, row["id"], "kl") for row in rows]
    completions = actor.complete(ids, temperature=actor.section.kl_temperature, seeds=seeds)
    return kl.divergence(actor.model, reference, ids, completions, actor.tokenizer.pad_token_id)
