import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lmrl.tree import (
    TabularPolicy,
    completions,
    enumerate_tree,
    exact_gradient,
    exact_values,
    expectation,
    flat_gradient,
    leaf_logprobs,
    leaf_probabilities,
    prompted_policy,
    row_gradients,
    score_matrix,
    sequence_entropy,
    sequence_kl,
    terminal_returns,
    visit_probabilities,
)

LN2 = math.log(2)


def close(actual, expected, tolerance=1e-10):
    expected = torch.as_tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(torch.as_tensor(actual).double(), expected, atol=tolerance, rtol=0)


def table(*rows):
    """A tabular policy over two tokens and two steps: logits after nothing, after 0, after 1."""
    policy = TabularPolicy(2, 2)
    with torch.no_grad():
        policy.logits.copy_(torch.tensor(rows, dtype=torch.float64))
    return policy


@pytest.fixture
def uniform():
    return table((0, 0), (0, 0), (0, 0))


@pytest.fixture
def tree(uniform):
    return enumerate_tree(uniform, max_length=2, eos_id=0)


REWARDS = torch.tensor([0.0, 1.0, 3.0])


# Three leaves by hand: stop; 1 and stop; 1 and 1 again, cut by the cap.


def test_leaves_by_hand(tree):
    assert completions(tree) == [[0], [1, 0], [1, 1]]
    assert tree.ids.tolist() == [[0, 0], [1, 0], [1, 1]]
    assert tree.mask.tolist() == [[True, False], [True, True], [True, True]]  # the stop token is a choice
    assert tree.truncated.tolist() == [False, False, True]
    assert tree.states[tree.mask].tolist() == [0, 0, 1, 0, 1]
    assert tree.prefixes.tolist() == [[0, 0], [1, 0]]
    assert tree.depth.tolist() == [0, 1]
    assert tree.children.tolist() == [[2 + 0, 1], [2 + 1, 2 + 2]]


def test_probabilities_by_hand(tree):
    close(leaf_probabilities(tree), [0.5, 0.25, 0.25])
    close(tree.logprobs, [[-LN2, 0], [-LN2, -LN2], [-LN2, -LN2]])
    close(visit_probabilities(tree), [1, 0.5])
    close(expectation(tree, REWARDS), 1)
    close(expectation(tree, torch.stack([REWARDS, 2 * REWARDS], 1)), [1, 2])


def test_values_by_hand(tree):
    v, q, a = exact_values(tree, REWARDS)
    close(v, [1, 2])
    close(q, [[0, 2], [1, 3]])
    close(a, [[-1, 1], [-1, 1]])
    close(exact_values(tree, REWARDS, gamma=0.5).v, [0.5, 2])


def test_returns_by_hand(tree):
    close(terminal_returns(REWARDS, tree.mask), [[0, 0], [1, 1], [3, 3]])
    close(terminal_returns(REWARDS, tree.mask, 0.5), [[0, 0], [0.5, 1], [1.5, 3]])
    holes = torch.tensor([[True, False, True, False]])
    close(terminal_returns(torch.ones(1), holes, 0.5), [[0.5, 0, 1, 0]])


def test_gradient_by_hand(tree, uniform):
    # d(s) π(a|s) A(s, a), laid out as the rows after nothing, after 0 (never reached), after 1
    close(exact_gradient(tree, REWARDS, uniform.parameters()), [-0.5, 0.5, 0, 0, -0.25, 0.25])


def test_scores_by_hand(tree, uniform):
    scores = [[0.5, -0.5, 0, 0, 0, 0], [-0.5, 0.5, 0, 0, 0.5, -0.5], [-0.5, 0.5, 0, 0, -0.5, 0.5]]
    close(score_matrix(tree, uniform.parameters()), scores)


def test_entropy_and_kl_by_hand(tree):
    other = enumerate_tree(table((math.log(3), 0), (0, 0), (0, 0)), 2, eos_id=0)  # stops at once with probability 3/4
    close(sequence_entropy(tree), 1.5 * LN2)
    close(sequence_kl(tree, other), 0.5 * math.log(0.5 / 0.75) + 0.5 * math.log(0.5 / 0.25))
    close(sequence_kl(other, tree), 0.75 * math.log(0.75 / 0.5) + 0.25 * math.log(0.25 / 0.5))


def test_impossible_tokens(tree):
    certain = table((0, -math.inf), (0, 0), (0, 0))
    only_stop = enumerate_tree(certain, 2, eos_id=0)
    close(leaf_probabilities(only_stop), [1, 0, 0])
    assert sequence_entropy(only_stop) == 0
    close(sequence_kl(only_stop, tree), LN2)
    assert sequence_kl(tree, only_stop) == math.inf
    assert exact_gradient(only_stop, REWARDS, certain.parameters()).isfinite().all()
    assert flat_gradient(sequence_entropy(only_stop), certain.parameters()).isfinite().all()


def test_without_a_stop_token_every_completion_is_cut_by_the_cap():
    tree = enumerate_tree(TabularPolicy(3, 2), max_length=2)
    assert completions(tree) == [[a, b] for a in range(3) for b in range(3)]
    assert tree.mask.all() and tree.truncated.all()


def test_any_callable_is_a_policy():
    row = torch.tensor([0.0, 1.0, 2.0])
    tree = enumerate_tree(lambda prefixes: row.expand(len(prefixes), 3), 2)
    choice = row.double().softmax(-1)
    close(leaf_probabilities(tree), torch.outer(choice, choice).flatten())


def test_tabular_rows_are_one_per_prefix_and_seeded():
    policy = TabularPolicy(3, 3, seed=4)
    with torch.no_grad():
        policy.logits.copy_(torch.arange(13.0)[:, None].expand(13, 3))
    prefixes = [torch.cartesian_prod(*[torch.arange(3)] * t).reshape(-1, t) for t in (1, 2)]
    assert policy(torch.zeros(1, 0, dtype=torch.int64))[0, 0] == 0
    assert policy(prefixes[0])[:, 0].tolist() == [1, 2, 3]
    assert policy(prefixes[1])[:, 0].tolist() == list(range(4, 13))
    assert torch.equal(TabularPolicy(3, 3, seed=4).logits, TabularPolicy(3, 3, seed=4).logits)
    assert not torch.equal(TabularPolicy(3, 3, seed=4).logits, TabularPolicy(3, 3, seed=5).logits)


def test_a_prompt_is_set_before_every_prefix():
    class Counter(torch.nn.Module):
        """Logits that count the ids in the context, position by position."""

        def forward(self, input_ids, use_cache):
            return type("Output", (), {"logits": torch.nn.functional.one_hot(input_ids, 3).cumsum(1)})

    policy = prompted_policy(Counter(), torch.tensor([2, 2]))
    assert policy(torch.zeros(1, 0, dtype=torch.int64)).tolist() == [[0, 0, 2]]
    assert policy(torch.tensor([[0, 1], [1, 1]])).tolist() == [[1, 1, 2], [0, 2, 2]]


def test_row_gradients_are_the_gradients_of_the_rows():
    policy = TabularPolicy(3, 2, seed=1)
    unused = torch.nn.Parameter(torch.zeros(2))
    parameters = [policy.logits, unused]
    values = leaf_logprobs(enumerate_tree(policy, 2, eos_id=0))
    one_by_one = torch.stack([flat_gradient(value, parameters) for value in values])
    assert one_by_one.shape == (7, 14) and (one_by_one[:, 12:] == 0).all()
    for chunk in (1, 3, 100):
        close(row_gradients(values, parameters, chunk=chunk), one_by_one)


@pytest.mark.parametrize(
    ("vocab_size", "max_length", "eos_id", "message"),
    [
        (2, 0, None, "max_length is 0"),
        (2, 2, 2, "eos_id is 2, outside the policy's vocabulary of 2"),
        (2, 2, -1, "eos_id is -1"),
        (10, 6, None, r"more than 100000 leaves \(vocabulary 10, max_length 6\)"),
        (100_001, 2, None, "more than 100000 leaves"),
    ],
)
def test_impossible_trees_are_refused(vocab_size, max_length, eos_id, message):
    with pytest.raises(ValueError, match=message):
        enumerate_tree(lambda prefixes: torch.zeros(len(prefixes), vocab_size), max_length, eos_id)


def test_kl_refuses_trees_with_different_leaves(tree, uniform):
    with pytest.raises(ValueError, match="different leaves"):
        sequence_kl(tree, enumerate_tree(uniform, 2))


trees = st.builds(
    lambda vocab_size, max_length, stops, seed: (vocab_size, max_length, 1 if stops else None, seed),
    st.integers(2, 4),
    st.integers(1, 3),
    st.booleans(),
    st.integers(0, 1000),
)


def build(vocab_size, max_length, eos_id, seed):
    policy = TabularPolicy(vocab_size, max_length, seed=seed)
    tree = enumerate_tree(policy, max_length, eos_id)
    rewards = torch.randn(len(tree.ids), generator=torch.Generator().manual_seed(seed + 1), dtype=torch.float64)
    return policy, tree, rewards


@settings(max_examples=25, deadline=None)
@given(trees, st.sampled_from([0.0, 0.5, 1.0]))
def test_the_oracle_agrees_with_itself(shape, gamma):
    policy, tree, rewards = build(*shape)
    choices, d, p = tree.log_policy.exp(), visit_probabilities(tree), leaf_probabilities(tree)
    v, q, a = exact_values(tree, rewards, gamma)
    close(p.sum(), 1)
    close(d[0], 1)
    close((choices * a).sum(-1), torch.zeros(len(v)))
    returns = terminal_returns(rewards, tree.mask, gamma)
    close(v[0], expectation(tree, returns[:, 0]))
    reached = torch.zeros_like(q).index_put((tree.states[tree.mask], tree.ids[tree.mask]), torch.ones(()).double())
    assert (reached == 1).all()  # every action of every state leads to a leaf
    weighted = (p[:, None] * returns)[tree.mask]
    where = (tree.states[tree.mask], tree.ids[tree.mask])
    close(torch.zeros_like(q).index_put(where, weighted, accumulate=True), d[:, None] * choices * q)

    scores = score_matrix(tree, policy.parameters())
    gradient = exact_gradient(tree, rewards, policy.parameters())
    close(expectation(tree, scores), torch.zeros(scores.shape[1]))
    close(expectation(tree, rewards[:, None] * scores), gradient)
    other = enumerate_tree(TabularPolicy(shape[0], shape[1], seed=shape[3] + 1), shape[1], shape[2])
    close(sequence_entropy(tree), -(d[:, None] * choices * tree.log_policy).sum())
    close(sequence_kl(tree, other), (d[:, None] * choices * (tree.log_policy - other.log_policy)).sum())
    assert sequence_kl(tree, other) > 0


@settings(max_examples=10, deadline=None)
@given(trees)
def test_gradient_against_finite_differences(shape):
    policy, tree, rewards = build(*shape)
    gradient, h = exact_gradient(tree, rewards, policy.parameters()), 1e-5
    entries = policy.logits.data.view(-1)
    for k in range(min(len(entries), 20)):
        values = []
        for step in (h, -2 * h):
            entries[k] += step
            values.append(expectation(enumerate_tree(policy, shape[1], shape[2]), rewards).item())
        entries[k] += h
        assert abs((values[0] - values[1]) / (2 * h) - gradient[k].item()) < 1e-8


def test_discounted_returns_are_as_exact_as_the_rewards():
    mask = torch.ones(1, 3, dtype=torch.bool)
    returns = terminal_returns(torch.ones(1, dtype=torch.float64), mask, gamma=0.9)
    assert returns.tolist() == [[pytest.approx(0.81, abs=1e-15), pytest.approx(0.9, abs=1e-15), 1.0]]
