"""KL(policy || reference) over the full vocabulary, in nats. Exact at each position; nothing is estimated but the mean over completions."""

from typing import Any

from configs.errors import ModelError

# Floats of one model's logits that are held at once, and of one block of log-probabilities: 256 MB and 32 MB.
LOGITS_AT_ONCE = 64 * 2**20
BLOCK = 8 * 2**20


def token_kl(policy_logits: Any, reference_logits: Any) -> Any:
    """KL(p || q) at each position, where p and q are the softmax of the logits, shape (positions, vocabulary); float32 (positions,), never negative.

    KL(p || q) = sum over the vocabulary of p (log p - log q). The logits are not divided by any temperature. Works in blocks of positions.
    """
    import torch

    step = max(1, BLOCK // policy_logits.shape[-1])
    parts = []
    for start in range(0, len(policy_logits), step):
        p = policy_logits[start : start + step].float().log_softmax(-1)
        q = reference_logits[start : start + step].float().log_softmax(-1)
        # Rounding can leave a hair below 0, which no divergence is.
        parts.append((p.exp() * (p - q)).sum(-1).clamp(min=0))
    return torch.cat(parts) if parts else policy_logits.new_zeros(0, dtype=torch.float32)


def divergence(
    policy: Any, reference: Any, prompts: list[list[int]], completions: list[list[int]], pad_id: int
) -> dict[str, float]:
    """{"kl": mean over all completion tokens, "kl_sequence": mean over completions of the sum over a completion's tokens}.

    `prompts` and `completions` are token ids; a completion includes its end-of-text token. The positions are those that predict a completion's
    tokens. Raises ModelError where the two vocabularies differ in size.
    """
    import torch

    sizes = [model.config.get_text_config().vocab_size for model in (policy, reference)]
    if sizes[0] != sizes[1]:
        raise ModelError(
            f"the policy's vocabulary has {sizes[0]} tokens and the reference's {sizes[1]}: KL is defined between models of one vocabulary only"
        )
    sums: list[float] = []
    tokens = 0
    with torch.inference_mode():
        for rows in batches([len(c) for c in completions], max(1, LOGITS_AT_ONCE // sizes[0])):
            inputs, lengths = _join([prompts[i] for i in rows], [completions[i] for i in rows], pad_id, policy.device)
            kept = max(lengths)
            p = policy(**inputs, logits_to_keep=kept + 1, use_cache=False).logits
            q = reference(**inputs, logits_to_keep=kept + 1, use_cache=False).logits
            for row, length in enumerate(lengths):
                # Rows end in padding after the completion; the position before a token predicts it.
                sums.append(token_kl(p[row, :length], q[row, :length]).double().sum().item())
            tokens += sum(lengths)
    return {"kl": sum(sums) / max(1, tokens), "kl_sequence": sum(sums) / max(1, len(sums))}


def batches(lengths: list[int], budget: int) -> list[list[int]]:
    """Indices of rows, in order, in groups whose (rows x longest) stays within `budget` positions; a group has at least one row."""
    groups: list[list[int]] = []
    longest = 0
    for index, length in enumerate(lengths):
        longest = max(longest, length)
        if not groups or (len(groups[-1]) + 1) * longest > budget:
            groups.append([])
            longest = length
        groups[-1].append(index)
    return groups


def _join(
    prompts: list[list[int]], completions: list[list[int]], pad_id: int, device: Any
) -> tuple[dict[str, Any], list[int]]:
    """Prompts padded on the left and completions on the right, so that all completions begin in one column."""
    import torch

    lengths = [len(c) for c in completions]
    left, right = max(map(len, prompts)), max(lengths)
    ids, mask = [], []
    for prompt, completion in zip(prompts, completions, strict=True):
        before, after = left - len(prompt), right - len(completion)
        ids.append([pad_id] * before + prompt + completion + [pad_id] * after)
        mask.append([0] * before + [1] * (len(prompt) + len(completion)) + [0] * after)
    attention = torch.tensor(mask, device=device)
    positions = (attention.cumsum(-1) - 1).clamp(min=0)
    return {
        "input_ids": torch.tensor(ids, device=device),
        "attention_mask": attention,
        "position_ids": positions,
    }, lengths
