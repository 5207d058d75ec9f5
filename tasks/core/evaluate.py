"""Measures a model on held-out prompts: greedy completions, scored as in training, and its KL from a reference."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from configs.errors import DataError
from configs.schema import ComputeSection, EvaluationSection, ModelSection, RewardConfig
from tasks.core import answers, kl, models, rewards
from tasks.core.trainer import read_rows, sample, write_rows


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
) -> dict[str, Any]:
    """Writes `metrics.json` and `completions.jsonl` (in the order of the held-out file) to `out` and returns the metrics.

    `policy` and `reference` are model folders, `data` is the data artifact. Metrics: accuracy, mean_reward, format_rate, truncated_rate (shares
    and means over prompts), mean_length (tokens, the end-of-text token included), num_prompts, `rewards/<component>` and, with a reference, kl and
    kl_sequence (see `measure_kl`). The same arguments give the same bytes on the same machine.
    Raises DataError for a split without rows, and what loading a model raises.
    """
    rows = held_out(section, data, seed)
    tokenizer = models.load_tokenizer(policy, model)
    actor = models.load_policy(policy, model, compute, for_training=False)
    prompts = [models.render_prompt(tokenizer, row["prompt"], model.chat_template_kwargs) for row in rows]
    ids = tokenizer(prompts)["input_ids"]
    stops = models.eos_ids(actor, tokenizer)
    completions = generate(actor, ids, stops, tokenizer.pad_token_id, section.max_new_tokens, section.batch_size, progress=emit)
    scored = score(rows, prompts, completions, stops, tokenizer, rewards.build(reward_type, reward_config))
    metrics = summary(scored)
    if reference is not None:
        other = models.load_policy(reference, model, compute, for_training=False)
        chosen = sample(ids, min(section.kl_samples, len(ids)), seed)
        metrics |= measure_kl(actor, other, chosen, stops, tokenizer.pad_token_id, section, seed)
    write_rows(out / "completions.jsonl", [{k: v for k, v in row.items() if k != "components"} for row in scored])
    (out / "metrics.json").write_text(json.dumps(metrics, sort_keys=True, indent=2, allow_nan=False) + "\n")
    return metrics


def held_out(section: EvaluationSection, data: Path, seed: int) -> list[dict[str, Any]]:
    """The rows to measure on, in the order of their file; `max_samples` of them are chosen by the seed alone, so that all models see the same."""
    rows = read_rows(data / f"{section.split}.jsonl")
    if not rows:
        raise DataError(f"evaluation.split is {section.split}, which holds no prompts: raise data.{section.split}_size or choose the other split")
    return [rows[i] for i in sorted(sample(list(range(len(rows))), section.max_samples, seed))]


def generate(
    model: Any,
    prompts: list[list[int]],
    stops: list[int],
    pad_id: int,
    max_new_tokens: int,
    batch_size: int,
    temperature: float | None = None,
    progress: Callable[..., None] = lambda **event: None,
) -> list[list[int]]:
    """Completions of the prompts (token ids), in their order, up to and including the token that ends them; greedy without a temperature.

    Runs in batches sorted by length, padded on the left, the longest first: what does not fit into memory fails at once.
    """
    import torch
    from transformers import GenerationConfig

    sampling = {"do_sample": False} if temperature is None else {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
    # Set on the model as well: `generate` fills gaps from the model's own, whose sampling settings are not ours.
    model.generation_config = GenerationConfig(max_new_tokens=max_new_tokens, eos_token_id=stops, pad_token_id=pad_id, **sampling)
    order = sorted(range(len(prompts)), key=lambda i: -len(prompts[i]))
    found: dict[int, list[int]] = {}
    for start in range(0, len(order), batch_size):
        batch = order[start : start + batch_size]
        width = len(prompts[batch[0]])
        ids = torch.tensor([[pad_id] * (width - len(prompts[i])) + prompts[i] for i in batch], device=model.device)
        mask = torch.tensor([[0] * (width - len(prompts[i])) + [1] * len(prompts[i]) for i in batch], device=model.device)
        with torch.inference_mode():
            produced = model.generate(input_ids=ids, attention_mask=mask)[:, width:].tolist()
        found |= {i: until_stop(tokens, stops) for i, tokens in zip(batch, produced, strict=True)}
        progress(event="progress", done=len(found), total=len(order))
    return [found[i] for i in range(len(prompts))]


def until_stop(tokens: list[int], stops: list[int]) -> list[int]:
    """The tokens up to and including the first that ends a completion.

    >>> until_stop([5, 6, 1, 0, 0], [1])
    [5, 6, 1]
    """
    end = next((i + 1 for i, token in enumerate(tokens) if token in stops), len(tokens))
    return tokens[:end]


def score(rows: list[dict], prompts: list[str], completions: list[list[int]], stops: list[int], tokenizer: Any, reward: Any) -> list[dict[str, Any]]:
    """One row per prompt, as in completions.jsonl, with its reward's `components` besides."""
    texts = tokenizer.batch_decode(completions, skip_special_tokens=True)
    golds, lengths = [row["gold"] for row in rows], [len(ids) for ids in completions]
    columns = {"prompts": prompts, "completion_ids": completions, "id": [row["id"] for row in rows], "question": [row["question"] for row in rows]}
    totals = reward.score(texts, golds, lengths, columns)
    scored = []
    for row, prompt, text, ids, points in zip(rows, prompts, texts, completions, totals, strict=True):
        answer = reward.answer(text)
        scored.append(
            {
                "id": row["id"],
                "prompt": prompt,
                "gold": row["gold"],
                "completion": text,
                "answer": answer,
                "correct": answer is not None and answers.same_answer(answer, row["gold"]),
                "formatted": answers.is_formatted(text),
                "reward": points["total"],
                "length": len(ids),
                "truncated": ids[-1] not in stops,
                "components": {name: value for name, value in points.items() if name != "total"},
            }
        )
    return scored


def summary(scored: list[dict[str, Any]]) -> dict[str, Any]:
    """The metrics of scored rows; a component that has no opinion on any row has no mean."""

    def mean(values: list[float]) -> float:
        return sum(values) / len(values)

    metrics = {
        "accuracy": mean([row["correct"] for row in scored]),
        "mean_reward": mean([row["reward"] for row in scored]),
        "format_rate": mean([row["formatted"] for row in scored]),
        "mean_length": mean([row["length"] for row in scored]),
        "truncated_rate": mean([row["truncated"] for row in scored]),
        "num_prompts": len(scored),
    }
    for name in scored[0]["components"]:
        values = [row["components"][name] for row in scored if row["components"][name] is not None]
        if values:
            metrics[f"rewards/{name}"] = mean(values)
    return metrics


def measure_kl(policy: Any, reference: Any, prompts: list[list[int]], stops: list[int], pad_id: int, section: EvaluationSection, seed: int) -> dict[str, float]:
    """KL(policy || reference) in nats, on one completion per prompt, sampled from the policy at `kl_temperature`.

    `kl` is the full-vocabulary divergence at each position, averaged over tokens; `kl_sequence` its sum over a completion, averaged over
    completions. The temperature only chooses the completions: the two distributions compared are the models' own, untempered.
    """
    import torch

    torch.manual_seed(seed)
    completions = generate(policy, prompts, stops, pad_id, section.max_new_tokens, section.batch_size, temperature=section.kl_temperature)
    return kl.divergence(policy, reference, prompts, completions, pad_id)
