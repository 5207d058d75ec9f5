"""The pipeline: data -> SFT -> GRPO -> evaluation -> verdict -> registration."""

from typing import Any

from prefect import flow
from prefect.states import Completed, State

from configs.schema import RunConfig
from tasks.base import prepare_base
from tasks.data import prepare_data
from tasks.evaluate import evaluate, find_champion, judge
from tasks.grpo import train_grpo
from tasks.register import register
from tasks.session import Stages, begin, configure, mended, session
from tasks.sft import train_sft
from tasks.stage import Artifact, Run


@flow(name="post-train")
def post_train(preset: str | None = None, config: RunConfig | None = None, overrides: dict[str, Any] | None = None) -> State:
    """Takes a base model and a data set to a judged, registered model version.

    Args:
        preset: Name of a shipped configuration (tiny, gsm8k-smollm2, gsm8k-qwen3-0.6b) or path of a YAML file; without config, none means tiny.
        config: A whole configuration instead of a preset.
        overrides: Values put over either, such as {"grpo.max_steps": 40}.
    """
    cfg = configure(preset, config, overrides)
    run = begin(cfg)
    with session(run, cfg) as stages:
        verdict = mended(pipeline, run, cfg, stages)
    passed = verdict.metrics["passed"]
    sentences = [g["sentence"] for g in verdict.metrics["verdict"]["gates"] if passed or g["outcome"] != "pass"]
    return Completed(name="Completed" if passed else "Rejected", message=" ".join(sentences), data=stages.summary)


def pipeline(run: Run, cfg: RunConfig, stages: Stages) -> Artifact:
    """The stages, in their order; gives the verdict."""
    champion = find_champion(run, cfg.registry, cfg.gates)
    data = stages.add(prepare_data(run, cfg.data, cfg.grpo, cfg.seed))
    base = stages.add(prepare_base(run, cfg.model, cfg.seed, data))
    measured = (cfg.evaluation, cfg.grpo, cfg.model, cfg.compute, cfg.seed, cfg.data, data)
    base_scores = stages.add(evaluate(run, "base", *measured, policy=base))
    sft = stages.add(train_sft(run, cfg.sft, cfg.grpo, cfg.model, cfg.compute, cfg.seed, base, data))
    sft_scores = stages.add(evaluate(run, "sft", *measured, policy=sft, reference=base))
    grpo = stages.add(train_grpo(run, cfg.grpo, cfg.model, cfg.compute, cfg.seed, sft, data))
    grpo_scores = stages.add(evaluate(run, "grpo", *measured, policy=grpo, reference=sft))
    champion_scores = champion and stages.add(evaluate(run, "champion", *measured, policy=champion))
    verdict = stages.add(judge(run, cfg.gates, base_scores, sft_scores, grpo_scores, champion_scores))
    stages.add(register(run, cfg.registry, grpo, grpo_scores, verdict))
    return verdict
