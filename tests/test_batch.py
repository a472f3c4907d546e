from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lmrl.batch import Rollouts, concatenate, cut_by_tokens, micro_batches, padding_share, rollouts_from_samples
from lmrl.loss import LOSS_TYPES, token_weights
from lmrl.policy import Samples, length_mask, pad_left


def rollouts_of(lengths, width=None):
    """Rollouts whose completion ids number the cells, so that a misplaced one shows."""
    width = width or max(lengths)
    rows = len(lengths)
    prompt_ids, prompt_mask = pad_left([[7] * (1 + i % 3) for i in range(rows)], 0)
    samples = Samples(
        ids=torch.arange(rows * width).view(rows, width),
        logprobs=-torch.arange(rows * width).view(rows, width).float(),
        lengths=torch.tensor(lengths),
        truncated=torch.tensor(lengths) == width,
    )
    return rollouts_from_samples(prompt_ids, prompt_mask, torch.arange(rows) // 2, samples)


def test_mask_comes_from_lengths_not_from_ids():
    eos = pad = 2
    samples = Samples(
        ids=torch.tensor([[5, 6, 2, 2, 2], [5, 6, 7, 8, 9], [2, 2, 2, 2, 2]]),
        logprobs=torch.zeros(3, 5),
        lengths=torch.tensor([3, 5, 1]),
        truncated=torch.tensor([False, True, False]),
    )
    prompt_ids, prompt_mask = pad_left([[eos, 4], [4], [3]], pad)
    rollouts = rollouts_from_samples(prompt_ids, prompt_mask, torch.arange(3), samples)
    assert rollouts.mask.int().tolist() == [[1, 1, 1, 0, 0], [1, 1, 1, 1, 1], [1, 0, 0, 0, 0]]
    assert rollouts.truncated.tolist() == [False, True, False]


def test_rollouts_are_trimmed_to_the_longest_completion():
    assert rollouts_of([1, 2], width=6).completion_ids.shape == (2, 2)


def test_wrong_shapes_are_refused():
    rollouts = rollouts_of([2, 3])
    with pytest.raises(ValueError, match=r"advantages has shape \(2,\)"):
        replace(rollouts, advantages=torch.zeros(2))
    for name in ("truncated", "group", "rewards", "graded"):
        with pytest.raises(ValueError, match=rf"{name} has shape \(2, 1\), expected \(2,\)"):
            replace(rollouts, **{name: torch.zeros(2, 1)})
    for wrong in (rollouts.prompt_mask[:, 1:], rollouts.prompt_mask[:1]):
        with pytest.raises(ValueError, match="prompt_ids and prompt_mask have shapes"):
            replace(rollouts, prompt_mask=wrong)
    for name in ("mask", "prompt_mask"):
        with pytest.raises(ValueError, match=f"{name} is torch.int64, expected bool"):
            replace(rollouts, **{name: getattr(rollouts, name).long()})


def test_select_and_trim_touch_every_known_field():
    rollouts = replace(rollouts_of([1, 4, 2]), advantages=torch.rand(3, 4), rewards=torch.rand(3))
    part = rollouts.select(torch.tensor([2, 0])).trim(2)
    assert len(part) == 2 and part.ref_logprobs is None
    for name, value in part.per_token().items():
        assert torch.equal(value, getattr(rollouts, name)[[2, 0], :2])
    assert torch.equal(part.rewards, rollouts.rewards[[2, 0]])
    assert torch.equal(part.prompt_ids, rollouts.prompt_ids[[2, 0]])
    assert torch.equal(part.trim(2, 1).prompt_mask, rollouts.prompt_mask[[2, 0], -1:])


@given(st.lists(st.integers(1, 7), min_size=1, max_size=9), st.integers(1, 60), st.sampled_from(LOSS_TYPES))
@settings(max_examples=50, deadline=None)
def test_micro_batches_hold_every_token_once_with_its_weight(lengths, budget, loss_type):
    rollouts = rollouts_of(lengths)
    weights = token_weights(rollouts.mask, loss_type, 7)
    seen, prompts = {}, []
    for piece, piece_weights in micro_batches(rollouts, weights, budget):
        assert len(piece) == 1 or piece.prompt_mask.numel() + piece.mask.numel() <= budget
        assert piece.mask.any(0).all() and piece.prompt_mask.any(0).all()  # no column is padding only
        prompts += [ids[real].tolist() for ids, real in zip(piece.prompt_ids, piece.prompt_mask, strict=True)]
        for cell, weight in zip(piece.completion_ids[piece.mask].tolist(), piece_weights[piece.mask], strict=True):
            assert cell not in seen
            seen[cell] = float(weight)
    expected = dict(zip(rollouts.completion_ids[rollouts.mask].tolist(), weights[rollouts.mask].tolist(), strict=True))
    assert seen == expected
    assert sorted(map(len, prompts)) == sorted(rollouts.prompt_mask.sum(1).tolist())


def test_the_cut_is_by_padded_tokens_longest_rows_first():
    """Prompts of 2: rows of 5, 4, 2 and 1 tokens under a budget of 14: 2 rows x 7, then 2 rows x 4."""
    assert list(cut_by_tokens([2, 2, 2, 2], [4, 1, 5, 2], 14)) == [[2, 0], [3, 1]]
    assert list(cut_by_tokens([2, 2, 2, 2], [4, 1, 5, 2], 13)) == [[2], [0, 3], [1]]
    assert list(cut_by_tokens([2, 2, 2, 2], [4, 1, 5, 2], 1)) == [[2], [0], [3], [1]]  # beyond the budget, alone
    assert list(cut_by_tokens([9, 1], [1, 1], 12)) == [[0], [1]]  # a long prompt counts too
    assert list(cut_by_tokens([], [], 12)) == []


def test_the_padding_share_counts_prompts_and_completions():
    """Prompts of 1, 2, 3 and completions of 4, 1, 1 tokens: 12 tokens in 3 x 7 cells, or in 1 x 5 and 2 x 4."""
    rollouts = rollouts_of([4, 1, 1])
    together = list(micro_batches(rollouts, rollouts.mask.float(), 21))
    assert len(together) == 1 and padding_share(together) == pytest.approx(1 - 12 / 21)
    apart = list(micro_batches(rollouts, rollouts.mask.float(), 9))
    assert [len(piece) for piece, _ in apart] == [1, 2] and padding_share(apart) == pytest.approx(1 - 12 / 13)
    assert padding_share([]) == 0.0


def test_micro_batches_keep_holes_and_empty_rows():
    rollouts = rollouts_of([4, 4, 4])
    mask = torch.tensor([[False] * 4, [True, False, True, False], [False] * 4])
    rollouts = replace(rollouts, mask=mask)
    (piece, weights), (empty, _) = micro_batches(rollouts, mask.float(), 6)
    assert piece.mask.tolist() == [[True, False, True]] and weights.sum() == 2
    assert empty.mask.shape == (2, 0)


def test_length_mask_matches_the_rollouts():
    rollouts = rollouts_of([3, 1])
    assert torch.equal(rollouts.mask, length_mask(torch.tensor([3, 1]), 3))
    assert isinstance(rollouts, Rollouts)


def test_concatenate_pads_renumbers_and_keeps_every_known_field():
    first = replace(rollouts_of([1, 2]), rewards=torch.tensor([1.0, 0.0]), advantages=torch.rand(2, 2))
    second = replace(rollouts_of([3, 1, 4]), rewards=torch.tensor([2.0, 3.0, 4.0]), advantages=torch.rand(3, 4))
    second = replace(second, group=torch.tensor([7, -1, 7]))
    both = concatenate([first, second])
    assert len(both) == 5 and both.mask.shape == (5, 4) and both.prompt_ids.shape == (5, 3)
    assert both.group.tolist() == [0, 0, 2, 1, 2]  # the label 0 of one part is not the 0 of another
    assert both.truncated.tolist() == first.truncated.tolist() + second.truncated.tolist()
    assert both.rewards.tolist() == [1, 0, 2, 3, 4] and both.old_logprobs is None
    back = both.select(torch.arange(2)).trim(2, 2)
    for name, value in replace(first, group=back.group).known().items():
        assert torch.equal(getattr(back, name), value), name
    assert not both.mask[:2, 2:].any() and not both.prompt_mask[:2, :1].any()  # padding is masked
    assert torch.equal(both.select(torch.arange(2, 5)).completion_ids, second.completion_ids)


def test_concatenate_of_one_part_and_of_parts_without_rows():
    part = rollouts_of([2, 3])
    none = part.select(torch.zeros(2, dtype=torch.bool))
    assert len(concatenate([none])) == 0
    for name, value in concatenate([none, part]).known().items():
        assert torch.equal(value, getattr(part, name)), name


def test_concatenate_refuses_parts_of_different_stages_and_no_parts():
    part = rollouts_of([2, 3])
    with pytest.raises(ValueError, match="know different fields"):
        concatenate([part, replace(part, rewards=torch.zeros(2))])
    with pytest.raises(ValueError, match="no rollouts"):
        concatenate([])
