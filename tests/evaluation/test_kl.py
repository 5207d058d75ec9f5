import itertools
import json
import math
from collections import Counter
from types import SimpleNamespace

import pytest
import tiny

from configs.errors import ModelError
from configs.schema import ModelSection
from tasks.core.evaluation import kl
from tasks.core.evaluation.generate import generate
from tasks.core.model import loading, location

PROMPTS = [[5, 6, 7], [8], [9, 10, 11, 12, 13], [14, 15]]


def test_kl_of_two_coins():
    import torch

    p, q = torch.tensor([[0.5, 0.5], [0.9, 0.1]]), torch.tensor([[0.25, 0.75], [0.9, 0.1]])
    expected = 0.5 * math.log(0.5 / 0.25) + 0.5 * math.log(0.5 / 0.75)
    assert kl.token_kl(p.log(), q.log()).tolist() == pytest.approx([expected, 0.0], abs=1e-7)


def test_kl_does_not_depend_on_the_blocks(monkeypatch):
    import torch

    torch.manual_seed(1)
    p, q = torch.randn(17, 11), torch.randn(17, 11)
    whole = kl.token_kl(p, q)
    monkeypatch.setattr(kl, "BLOCK", 23)
    assert torch.equal(kl.token_kl(p, q), whole)


def test_kl_is_never_negative():
    import torch

    torch.manual_seed(1)
    p = torch.randn(4096, 7) * 20
    values = kl.token_kl(p, p + torch.randn(4096, 7) * 1e-6)
    assert values.min() >= 0


def test_kl_of_a_model_and_itself_is_zero(pair):
    found = kl.divergence(pair[0], pair[0], PROMPTS, [[20, 21, 1], [22, 1], [23], [24, 25]], pad_id=0)
    assert found == {"kl": 0.0, "kl_sequence": 0.0}


def test_kl_of_rows_padded_together_is_that_of_rows_alone(pair):
    import torch

    completions = [[20, 21, 1], [22, 1], [23], [24, 25, 26, 27]]
    sums = []
    for prompt, completion in zip(PROMPTS, completions, strict=True):
        ids = torch.tensor([prompt + completion])
        with torch.no_grad():
            p, q = (model(ids).logits[0, len(prompt) - 1 : -1].double().log_softmax(-1) for model in pair)
        sums.append((p.exp() * (p - q)).sum().item())
    found = kl.divergence(*pair, PROMPTS, completions, pad_id=0)
    assert found["kl"] == pytest.approx(sum(sums) / 10, rel=1e-5)
    assert found["kl_sequence"] == pytest.approx(sum(sums) / 4, rel=1e-5)


def test_kl_does_not_depend_on_the_batches(pair, monkeypatch):
    completions = [[20, 21, 1], [22, 1], [23], [24, 25, 26, 27]]
    together = kl.divergence(*pair, PROMPTS, completions, pad_id=0)
    monkeypatch.setattr(kl, "LOGITS_AT_ONCE", 1)
    assert kl.divergence(*pair, PROMPTS, completions, pad_id=0) == pytest.approx(together, rel=1e-5)


@pytest.mark.parametrize(
    ("lengths", "budget", "expected"),
    [([3, 1, 2], 6, [[0, 1], [2]]), ([9, 1], 4, [[0], [1]]), ([2, 2, 2], 100, [[0, 1, 2]])],
)
def test_batches_stay_within_their_budget(lengths, budget, expected):
    assert kl.batches(lengths, budget) == expected


def test_expected_kl_of_sampled_completions_is_the_kl_of_the_distributions_over_sequences():
    """The mean of per-token sums over completions sampled from the policy is KL over whole sequences: enumerated on 3 tokens, 2 long."""
    import torch

    torch.manual_seed(3)
    first = torch.randn(2, 3)  # (model, token)
    second = torch.randn(2, 3, 3)  # (model, first token, token)
    p1, q1 = first.log_softmax(-1).double()
    p2, q2 = second.log_softmax(-1).double()
    sequences = list(itertools.product(range(3), range(3)))
    exact = sum((p1[a] + p2[a, b]).exp() * (p1[a] + p2[a, b] - q1[a] - q2[a, b]) for a, b in sequences).item()
    # What divergence() adds up for each completion, weighted by how often the policy writes it.
    by_token = sum(
        (p1[a] + p2[a, b]).exp().item()
        * kl.token_kl(torch.stack([p1, p2[a]]), torch.stack([q1, q2[a]])).double().sum().item()
        for a, b in sequences
    )
    assert by_token == pytest.approx(exact, rel=1e-6)


def test_models_of_two_vocabularies_are_refused(pair, tmp_path):
    other = ModelSection(name="scratch", scratch=tiny.MODEL.scratch.model_dump() | {"vocab_size": 310})
    data = tmp_path / "data"
    tiny.write_data(data)
    with (data / "sft.jsonl").open("a") as file:
        words = " ".join(a + b + c for a, b, c in itertools.product("abcdef", repeat=3))
        file.write(
            json.dumps({"id": "x", "prompt": [{"role": "user", "content": words}], "completion": (words + " ") * 3})
            + "\n"
        )
    location.build_base(other, data, 1, tmp_path)
    larger = loading.load_policy(tmp_path / "model", other, tiny.CPU, for_training=False)
    with pytest.raises(ModelError, match=r"vocabulary has \d+ tokens and the reference's \d+"):
        kl.divergence(pair[0], larger, PROMPTS, PROMPTS, pad_id=0)


def test_measured_kl_is_that_of_all_completions_enumerated(tiny_pair):
    """KL over whole completions, from their probabilities alone, is the mean of what `divergence` measures on each, and per token likewise; 1 % is asked."""
    exact = sum(p * math.log(p / q) for p, q, _ in tiny_pair.completions.values())
    measured = sum(p * found["kl_sequence"] for p, _, found in tiny_pair.completions.values())
    assert measured == pytest.approx(exact, rel=1e-4)
    # Divided by the mean number of tokens, as over all tokens of many samples.
    tokens = sum(p * len(c) for c, (p, _, _) in tiny_pair.completions.items())
    assert sum(
        p * found["kl"] * len(c) for c, (p, _, found) in tiny_pair.completions.items()
    ) / tokens == pytest.approx(exact / tokens, rel=1e-4)


def test_trls_k3_has_the_same_mean_on_the_same_tokens(tiny_pair):
    """TRL's estimate looks at the drawn tokens alone, ours at the whole vocabulary: over all completions, weighted as the policy writes them, they agree."""
    import torch

    estimated = 0.0
    for completion, (p, _, _) in tiny_pair.completions.items():
        ids = torch.tensor([[*tiny_pair.prompt, *completion]])
        chosen = torch.tensor(completion)[:, None]
        with torch.no_grad():
            ours, theirs = (
                m(ids).logits[0, 1:-1].log_softmax(-1).gather(1, chosen)
                for m in (tiny_pair.policy, tiny_pair.reference)
            )
        # per_token_kl of trl.GRPOTrainer._compute_loss
        estimated += p * (torch.exp(theirs - ours) - (theirs - ours) - 1).double().sum().item()
    assert estimated == pytest.approx(
        sum(p * found["kl_sequence"] for p, _, found in tiny_pair.completions.values()), rel=1e-4
    )


def test_sampled_completions_come_as_often_as_they_are_likely(tiny_pair):
    """Total variation between 2,000 completions and the enumerated distribution: sampling noise alone is 0.04 here, a wrong temperature more than 0.2."""
    found = Counter(
        map(
            tuple,
            generate(
                tiny_pair.policy, [tiny_pair.prompt] * 2000, [1], 0, 3, 500, temperature=1.0, seeds=list(range(2000))
            ),
        )
    )
    assert set(found) <= set(tiny_pair.completions)
    assert sum(abs(found[c] / 2000 - p) for c, (p, _, _) in tiny_pair.completions.items()) / 2 < 0.1


@pytest.fixture(scope="module")
def tiny_pair():
    """Two models of 4 tokens that write at most 3, 1 ending a completion: every completion with its probability under both and its measured divergence."""
    import torch

    policy, reference = (tiny_llama(seed) for seed in (1, 2))
    prompt, completions = [3, 2], {}
    for length in (1, 2, 3):
        for completion in itertools.product(range(4), repeat=length):
            if 1 in completion[:-1] or (completion[-1] != 1 and length < 3):
                continue
            ids, chosen = torch.tensor([[*prompt, *completion]]), torch.tensor(completion)[:, None]
            with torch.no_grad():
                p, q = (
                    m(ids).logits[0, 1:-1].double().log_softmax(-1).gather(1, chosen).sum().exp().item()
                    for m in (policy, reference)
                )
            completions[completion] = (p, q, kl.divergence(policy, reference, [prompt], [list(completion)], pad_id=0))
    assert sum(p for p, _, _ in completions.values()) == pytest.approx(1, abs=1e-6)
    return SimpleNamespace(policy=policy, reference=reference, prompt=prompt, completions=completions)


def tiny_llama(seed):
    """A model of 4 tokens, far from uniform."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    }
    return LlamaForCausalLM(LlamaConfig(vocab_size=4, initializer_range=0.4, **sizes)).eval()
