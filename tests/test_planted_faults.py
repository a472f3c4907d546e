"""Law 6: each classic mistake, planted in the package, turns a named check red.

A fault is a function that gets the production function and returns the faulty one. It is bound wherever the production
function was bound, default arguments and tables included; then the check, a test of another file, has to fail with an AssertionError.
"""

import copy
import importlib
import inspect
import os
import pkgutil
import shutil
import sys
import textwrap
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace

import pytest
import torch
from test_checkpoint import metrics_file, run_folder  # noqa: F401  fixtures of the checks
from test_logprobs import batch  # noqa: F401
from test_models import folder  # noqa: F401
from test_policy import policy, tokenizer  # noqa: F401
from test_preflight import hangs_and_swallows
from test_resume import never_failed  # noqa: F401
from test_tree import tree, uniform  # noqa: F401
from test_values import tiny  # noqa: F401

import lmrl


@dataclass(frozen=True)
class Check:
    """A test of another file, "test_x.py::test_y", with arguments for what it is parametrised with."""

    name: str
    arguments: tuple = ()

    def __str__(self):
        return self.name.partition("::")[2]

    def function(self) -> Callable:
        file, _, name = self.name.partition("::")
        function = getattr(importlib.import_module(file.removesuffix(".py")), name)
        return function.hypothesis.inner_test if hasattr(function, "hypothesis") else function

    def bound(self, request) -> Callable:
        """The check, ready to run, with its fixtures made."""
        function, arguments = self.function(), dict(self.arguments)
        for parameter in inspect.signature(function).parameters.values():
            if parameter.name not in arguments and parameter.default is parameter.empty:
                arguments[parameter.name] = request.getfixturevalue(parameter.name)
        return lambda: function(**arguments)


@dataclass(frozen=True)
class Fault:
    make: Callable
    target: str
    check: Check

    def __str__(self):
        return f"{self.make.__name__}-{self.target.removeprefix('lmrl.')}"


FAULTS: list[Fault] = []

for module in pkgutil.walk_packages(lmrl.__path__, "lmrl."):  # a late import would keep the faulty function
    importlib.import_module(module.name)


def planted(target: str, check: str, **arguments):
    """Enter a fault: where it goes, and which check has to see it."""

    def enter(make):
        FAULTS.append(Fault(make, target, Check(check, tuple(arguments.items()))))
        return make

    return enter


def plant(monkeypatch, fault: Fault) -> None:
    owner, _, name = fault.target.rpartition(".")
    owner = pkgutil.resolve_name(owner)
    original = getattr(owner, name)
    faulty = fault.make(original)
    monkeypatch.setattr(owner, name, faulty)
    modules = [m for key, m in sys.modules.items() if key.startswith(("lmrl", "test_")) and key != __name__]
    for module in modules:
        for key, value in list(vars(module).items()):
            if value is original:
                monkeypatch.setattr(module, key, faulty)
            for entry in [entry for entry, known in value.items() if known is original] if type(value) is dict else ():
                monkeypatch.setitem(value, entry, faulty)  # a table of functions, such as RATIOS
            for argument, default in (getattr(value, "__kwdefaults__", None) or {}).items():
                if default is original:
                    monkeypatch.setitem(value.__kwdefaults__, argument, faulty)


def then(function, change):
    """`function`, with `change` applied to what it returns."""
    return lambda *args, **kwargs: change(function(*args, **kwargs))


def edited(function, old, new):
    """`function` with one piece of its text replaced."""
    source = textwrap.dedent(inspect.getsource(function))
    if source.count(old) != 1:
        raise LookupError(f"{function.__qualname__} has {old!r} {source.count(old)} times: plant the fault anew")
    made = {}
    exec(compile(source.replace(old, new), "<planted>", "exec"), vars(sys.modules[function.__module__]), made)
    return made[function.__name__]


def altered(model, name, change):
    """A model that gets the argument `name` changed."""
    return lambda *args, **kwargs: model(*args, **kwargs | {name: change(kwargs[name])})


UPDATE = "test_trainer.py::test_an_update_is_the_formula_written_out"
REFERENCE = {"beta": 0.5, "epsilon_high": 0.3, "mask_truncated_completions": True, "weight_decay": 0.1}
CENTRED = {"beta": 0.0, "epsilon_high": 0.1, "scale_rewards": "none", "max_grad_norm": 0.05}


# --- masks and stop tokens --------------------------------------------------------------------------------------------

MASKS = "test_batch.py::test_mask_comes_from_lengths_not_from_ids"
LENGTHS = "test_policy.py::test_lengths_stop_tokens_and_truncation_agree"


def without_stop_token(mask, truncated):
    last = mask & (mask.flip(1).cumsum(1).flip(1) == 1)
    return mask & ~(last & ~truncated[:, None])


@planted("lmrl.batch.rollouts_from_samples", MASKS)
def sampled_eos_masked(rollouts_from_samples):
    return then(rollouts_from_samples, lambda r: replace(r, mask=without_stop_token(r.mask, r.truncated)))


@planted("lmrl.trainer.loss_mask", "test_trainer.py::test_masking_truncated_completions")
def sampled_eos_out_of_the_loss(loss_mask):
    return lambda rollouts, *args: without_stop_token(loss_mask(rollouts, *args), rollouts.truncated)


@planted("lmrl.policy.complete", LENGTHS)
def sampled_eos_dropped_by_the_decode_loop(complete):
    return then(complete, lambda s: replace(s, lengths=s.lengths - (~s.truncated).long()))


@planted("lmrl.policy.demonstration_batch", "test_policy.py::test_demonstrations_end_with_a_trained_eos")
def demonstrations_without_eos(demonstration_batch):
    return then(demonstration_batch, lambda b: (*b[:3], b[3] & (b[2] != 2)))


@planted("lmrl.batch.rollouts_from_samples", MASKS)
def mask_from_comparing_ids_with_pad(rollouts_from_samples):
    return then(rollouts_from_samples, lambda r: replace(r, mask=r.completion_ids != 2))


@planted("lmrl.policy.pad_right", "test_policy.py::test_padding_keeps_every_token_even_if_it_equals_the_pad_id", rows=[[0, 1]])  # fmt: skip
@planted("lmrl.policy.pad_left", "test_policy.py::test_padding_keeps_every_token_even_if_it_equals_the_pad_id", rows=[[0, 1]])  # fmt: skip
def padding_mask_from_comparing_ids_with_pad(pad):
    def faulty(rows, pad_id):
        ids, _ = pad(rows, pad_id)
        return ids, ids != pad_id

    return faulty


@planted("lmrl.policy.length_mask", MASKS)
def mask_one_token_late(length_mask):
    return then(length_mask, lambda mask: mask.roll(1, 1))


@planted("lmrl.policy.length_mask", MASKS)
def mask_one_token_early(length_mask):
    return then(length_mask, lambda mask: mask.roll(-1, 1))


@planted("lmrl.policy.length_mask", MASKS)
def token_after_eos_trained(length_mask):
    return lambda lengths, width: length_mask(lengths + 1, width)


@planted("lmrl.batch.rollouts_from_samples", MASKS)
def prompt_trained(rollouts_from_samples):
    def with_prompt(r):
        ids = torch.cat([r.prompt_ids, r.completion_ids], 1)
        mask = torch.cat([r.prompt_mask, r.mask], 1)
        logprobs = torch.cat([torch.zeros(r.prompt_ids.shape), r.sampler_logprobs], 1)
        return replace(r, completion_ids=ids, mask=mask, sampler_logprobs=logprobs)

    return then(rollouts_from_samples, with_prompt)


@planted("lmrl.policy.complete", LENGTHS)
def truncated_counted_as_finished(complete):
    return then(complete, lambda s: replace(s, truncated=torch.zeros_like(s.truncated)))


@planted("lmrl.policy.complete", LENGTHS)
def end_id_written_over_a_cut_completion(complete):
    def overwrite(s):
        ids = s.ids.clone()
        ids[s.truncated, -1] = 2
        return replace(s, ids=ids)

    return then(complete, overwrite)


@planted("lmrl.policy.complete", "test_policy.py::test_several_stop_ids")
def only_the_first_stop_id(complete):
    return lambda *args, stop_ids, **kwargs: complete(*args, stop_ids=stop_ids[:1], **kwargs)


@planted("lmrl.policy.complete", "test_rollout.py::test_a_stop_id_in_the_prompt_does_not_end_the_completion")
def stop_id_in_the_prompt_ends_the_completion(complete):
    def faulty(model, prompt_ids, prompt_mask, rows, uniforms, *, stop_ids, **kwargs):
        samples = complete(model, prompt_ids, prompt_mask, rows, uniforms, stop_ids=stop_ids, **kwargs)
        ended = torch.isin(prompt_ids, torch.tensor(stop_ids)).any(1)[rows]
        return replace(samples, lengths=samples.lengths.masked_fill(ended, 1))

    return faulty


@planted("lmrl.models.stop_token_ids", "test_models.py::test_stop_ids_of_the_generation_config",
         configured=[2, 7], expected=[2, 7])  # fmt: skip
def stop_ids_of_the_tokenizer_only(stop_token_ids):
    return then(stop_token_ids, lambda ids: ids[:1])


@planted("lmrl.trainer.loss_mask", "test_trainer.py::test_masking_truncated_completions")
def truncated_completions_kept_though_masking_was_asked(loss_mask):
    return lambda rollouts, mask_truncated: loss_mask(rollouts, False)


@planted("lmrl.trainer.loss_mask", "test_trainer.py::test_ungraded_completions_leave_the_loss")
def ungraded_rows_in_the_loss(loss_mask):
    return lambda rollouts, *args: rollouts.mask


# --- log-probs --------------------------------------------------------------------------------------------------------

ALIGNMENT = "test_policy.py::test_alignment_first_and_last_token"
LEFT_PADDING = "test_policy.py::test_left_padding_does_not_change_a_row"
SAMPLED = "test_policy.py::test_sampled_logprobs_equal_scored_logprobs"
TRUNCATED = "test_rollout.py::test_the_reported_logprobs_are_those_of_the_truncated_distribution"
NUMBERS = "test_policy.py::test_tempered_logprobs_have_the_right_numbers"


@planted("lmrl.policy.completion_logits", ALIGNMENT)
def logits_one_token_late(completion_logits):
    return edited(completion_logits, "output.logits[:, :-1]", "output.logits[:, 1:]")


@planted("lmrl.policy.completion_logits", ALIGNMENT)
def logits_one_token_early(completion_logits):
    return then(completion_logits, lambda logits: torch.cat([logits[:, :1], logits[:, :-1]], 1))


@planted("lmrl.policy.token_logprobs", ALIGNMENT)
def prompt_scored(token_logprobs):
    def faulty(model, prompt_ids, prompt_mask, completion_ids, *args):
        width = completion_ids.shape[1]
        scored = torch.cat([prompt_ids, completion_ids], 1)[:, -width - 1 : -1]
        return token_logprobs(model, prompt_ids[:, :-1], prompt_mask[:, :-1], scored, *args)

    return faulty


@planted("lmrl.policy.complete", SAMPLED, family="qwen3", temperature=1.0)
def sampler_logprobs_one_token_late(complete):
    return then(complete, lambda s: replace(s, logprobs=s.logprobs.roll(1, 1)))


@planted("lmrl.policy.completion_logits", "test_claims_11.py::test_claim_11_3_masked_tokens_contribute_nothing_to_the_parameters",
         loss_type="dapo", seed=0)  # fmt: skip
def pad_ids_trusted_in_the_prompt(completion_logits):
    return lambda model, ids, mask, *args: completion_logits(model, ids, ids != 0, *args)


@planted("lmrl.policy.completion_inputs", LEFT_PADDING, family="gpt2")
@planted("lmrl.policy.completion_inputs", LEFT_PADDING, family="qwen3")
def scoring_without_attention_mask(completion_inputs):
    return then(completion_inputs, lambda i: i | {"attention_mask": torch.ones_like(i["attention_mask"])})


@planted("lmrl.policy.completion_inputs", "test_values.py::test_critic_has_one_value_for_every_state",
         build=lambda: importlib.import_module("test_values").gpt2())  # fmt: skip
@planted("lmrl.policy.completion_inputs", LEFT_PADDING, family="gpt2")
def scoring_positions_counted_from_the_padding(completion_inputs):
    return then(completion_inputs, lambda i: i | {"position_ids": torch.ones_like(i["input_ids"]).cumsum(1) - 1})


@planted("lmrl.policy.complete", SAMPLED, family="qwen3", temperature=1.0)
def sampling_without_attention_mask(complete):
    return lambda model, *args, **kwargs: complete(altered(model, "attention_mask", torch.ones_like), *args, **kwargs)


@planted("lmrl.policy.complete", SAMPLED, family="gpt2", temperature=1.0)
def sampling_positions_counted_from_the_padding(complete):
    return edited(
        complete,
        "(attention_mask.cumsum(1) - 1).clamp(min=0)",
        "attention_mask.cumsum(1) * 0 + torch.arange(prompt_ids.shape[1])",
    )


@planted("lmrl.policy.complete", "test_rollout.py::test_every_kind_of_cache_gives_the_scored_logprobs", name="qwen3")
def cache_rows_mixed_up(complete):
    return edited(complete, "cache.reorder_cache(kept)", "cache.reorder_cache(kept.roll(1))")


@planted("lmrl.policy.tempered", NUMBERS)
def temperature_multiplied(tempered):
    return lambda logits, temperature: tempered(logits, 1 / temperature)


@planted("lmrl.policy.tempered", "test_policy.py::test_logprobs_are_at_least_float32", dtype=torch.bfloat16)
def logits_left_in_half_precision(tempered):
    return lambda logits, temperature: logits / temperature


@planted("lmrl.policy.gather_logprobs", NUMBERS)
def log_softmax_in_half_precision(gather_logprobs):
    return lambda logits, ids: gather_logprobs(logits.bfloat16(), ids).to(logits.dtype)


@planted("lmrl.policy.token_logprobs", SAMPLED, family="qwen3", temperature=0.6)
def temperature_missing_in_scoring(token_logprobs):
    return lambda model, prompts, mask, ids, temperature=1.0: token_logprobs(model, prompts, mask, ids)


@planted("lmrl.rollout.TorchSampler.distribution", "test_rollout.py::test_the_sampler_tempers_what_it_reports")
@planted(
    "lmrl.rollout.TorchSampler.distribution", "test_trainer.py::test_temperature_is_on_both_sides", temperature=0.6
)
def temperature_missing_in_sampling(distribution):
    return lambda self, logits: distribution(replace(self, temperature=1.0), logits)


RAW = "raw = output.logits[:, -1] if t else output.logits[rows, -1]; tempered = logits if t else logits[rows]; "


@planted("lmrl.policy.complete", "test_rollout.py::test_the_sampler_tempers_what_it_reports")
@planted("lmrl.policy.complete", TRUNCATED, settings={"top_p": 0.5}, temperature=0.6)
def sampler_reports_raw_logprobs(complete):
    report = "logprob = raw.log_softmax(-1).gather(-1, token[:, None]).squeeze(-1)"
    return edited(complete, "ids[running, t], ", f"{RAW}{report}; ids[running, t], ")


@planted("lmrl.policy.complete", "test_rollout.py::test_truncated_samples_follow_the_renormalised_distribution")
def sampler_draws_untempered_and_reports_tempered(complete):
    report = "logprob = tempered.log_softmax(-1).gather(-1, token[:, None]).squeeze(-1)"
    draw = f"{RAW}token, _ = draw_token(raw.masked_fill(tempered.isinf(), -torch.inf), uniforms[running, t]); {report}"
    return edited(complete, "token, logprob = draw_token(logits if t else logits[rows], uniforms[running, t])", draw)


@planted("lmrl.policy.complete", TRUNCATED, settings={"min_p": 0.5}, temperature=1.0)
@planted("lmrl.policy.complete", TRUNCATED, settings={"top_p": 0.5}, temperature=1.0)
@planted("lmrl.policy.complete", TRUNCATED, settings={"top_k": 3}, temperature=0.6)
def truncated_distribution_not_renormalised(complete):
    whole = "tempered.logsumexp(-1) - (raw / 1.0).logsumexp(-1)"
    return edited(complete, "ids[running, t], ", f"{RAW}logprob = logprob + {whole}; ids[running, t], ")


@planted("lmrl.rollout.truncate", "test_rollout.py::test_truncation_by_hand", settings={"top_k": 3, "top_p": 0.82}, kept=[0, 0.625, 0, 0.375])  # fmt: skip
def top_p_of_what_top_k_cut_off_too(truncate):
    def faulty(logits, top_k=0, top_p=1.0, min_p=0.0):
        cut = [truncate(logits, top_k), truncate(logits, 0, top_p), truncate(logits, 0, 1.0, min_p)]
        return torch.stack(cut).amin(0)

    return faulty


@planted("lmrl.rollout.truncate", "test_rollout.py::test_truncation_by_hand", settings={"top_p": 0.6}, kept=[0, 0.625, 0, 0.375])  # fmt: skip
def top_p_without_the_token_that_crosses_it(truncate):
    return edited(truncate, "<= 1 - top_p", "< 1 - top_p + ordered.softmax(-1)")


NEIGHBOURS = "test_rollout.py::test_a_completion_does_not_depend_on_its_batch"


@planted("lmrl.rollout.row_uniforms", NEIGHBOURS, name="qwen3", dtype=torch.float64)
@planted("lmrl.rollout.row_uniforms", "test_rollout.py::test_the_random_numbers_differ_by_seed_prompt_sample_and_token")
def randomness_by_batch_position(row_uniforms):
    return lambda prompts, *args, **kwargs: row_uniforms([[i] for i in range(len(prompts))], *args, **kwargs)


@planted("lmrl.rollout.row_uniforms", "test_rollout.py::test_completions_of_one_prompt_differ")
def one_random_stream_for_all_samples_of_a_prompt(row_uniforms):
    def faulty(prompts, num_generations, *args, **kwargs):
        return row_uniforms(prompts, 1, *args, **kwargs).repeat_interleave(num_generations, 0)

    return faulty


@planted(
    "lmrl.rollout.row_uniforms", "test_rollout.py::test_the_same_seed_gives_the_same_rollouts_and_another_one_does_not"
)
def seed_ignored_by_the_sampler(row_uniforms):
    return lambda prompts, count, cap, seed: row_uniforms(prompts, count, cap, 0)


@planted(
    "lmrl.rollout.TorchSampler.distribution", "test_rollout.py::test_the_checkpoints_generation_settings_are_not_used"
)
def checkpoints_generation_settings_used(distribution):
    def faulty(self, logits):
        config = self.model.generation_config
        return distribution(replace(self, top_k=config.top_k or 0, top_p=config.top_p or 1.0), logits)

    return faulty


@planted("lmrl.policy.draw_token", "test_policy.py::test_draw_token_inverts_the_cumulative_sum")
def the_likeliest_token_instead_of_a_sample(draw_token):
    return lambda logits, _: (logits.argmax(-1), logits.log_softmax(-1).amax(-1))


@planted("lmrl.models.disable_dropout", "test_models.py::test_dropout_is_off_even_in_train_mode")
def dropout_left_on(disable_dropout):
    return lambda model: model.train()


@planted("lmrl.trainer.micro_batch_pass", "test_trainer.py::test_dropout_is_off_while_scoring")
def dropout_in_the_passes_that_train(micro_batch_pass):
    def faulty(model, *args):
        for layer in model.model.layers:
            layer.self_attn.attention_dropout = 0.5
        return micro_batch_pass(model.train(), *args)

    return faulty


# --- log-probs without the logits -------------------------------------------------------------------------------------

TILES = "test_logprobs.py::test_many_small_tiles_give_the_materialised_values_and_gradients"
MODELS = "test_logprobs.py::test_completion_logprobs_are_those_of_the_materialised_logits"


@planted("lmrl.logprobs.tile_gradient", TILES, temperature=0.6, softcap=None)
@planted("lmrl.logprobs.tile_gradient", TILES, temperature=0.6, softcap=3.0)
@planted("lmrl.logprobs.tile_gradient", MODELS, name="qwen3", temperature=0.6)
def fused_gradient_without_the_temperature(tile_gradient):
    def faulty(*args):
        return tile_gradient(*args) * args[-1]

    return faulty


@planted("lmrl.logprobs.tile_gradient", TILES, temperature=1.0, softcap=None)
@planted("lmrl.logprobs.tile_gradient", MODELS, name="qwen3", temperature=1.0)
def fused_gradient_without_the_entropy(tile_gradient):
    return lambda logits, targets, entropy, logsumexp, slopes, *rest: tile_gradient(
        logits, targets, entropy, logsumexp, (slopes[0], None), *rest
    )


@planted("lmrl.logprobs.tile_gradient", TILES, temperature=1.0, softcap=3.0)
@planted("lmrl.logprobs.tile_gradient", MODELS, name="gemma2", temperature=1.0)
def fused_gradient_without_the_slope_of_the_softcap(tile_gradient):
    return edited(tile_gradient, "if bend is not None", "if False")


@planted("lmrl.logprobs.tile_gradient", MODELS, name="cohere", temperature=1.0)
def fused_gradient_without_the_scale_of_the_logits(tile_gradient):
    return lambda *args: tile_gradient(*args) / args[-2].scale


@planted("lmrl.logprobs.output_head", MODELS, name="gemma3_text", temperature=1.0)
def softcap_of_the_model_ignored(output_head):
    return then(output_head, lambda head: replace(head, softcap=None))


@planted("lmrl.logprobs.output_head", MODELS, name="granite", temperature=1.0)
def logit_scale_of_the_model_ignored(output_head):
    return then(output_head, lambda head: replace(head, scale=1.0))


@planted("lmrl.logprobs.output_head", MODELS, name="phi", temperature=1.0)
def bias_of_the_head_ignored(output_head):
    return then(output_head, lambda head: replace(head, bias=0 * head.bias))


@planted("lmrl.logprobs.pieces", TILES, temperature=1.0, softcap=None)
def last_vocabulary_tile_skipped(pieces):
    return lambda total, size: pieces(total - total % size, size) if total > 20 else pieces(total, size)


@planted("lmrl.logprobs.fold", TILES, temperature=1.0, softcap=None)
def running_sums_not_rescaled_at_a_new_maximum(fold):
    return edited(fold, "drop.exp()", "torch.ones_like(drop)")


@planted("lmrl.logprobs.fold", TILES, temperature=1.0, softcap=None)
def targets_not_moved_into_the_tile(fold):
    return lambda logits, targets, sums: fold(logits, targets % logits.shape[1], sums)


@planted("lmrl.logprobs.product", "test_logprobs.py::test_half_precision_is_summed_in_float32", dtype=torch.bfloat16)
def products_in_half_precision(product):
    return lambda a, b: (a.to(b.dtype) @ b).to(torch.promote_types(b.dtype, torch.float32))


@planted("lmrl.logprobs.hidden_states", MODELS, name="qwen3", temperature=1.0)
def hidden_states_one_token_late(hidden_states):
    return edited(hidden_states, "prompt_ids.shape[1] - 1 : -1", "prompt_ids.shape[1] :")


@planted("lmrl.logprobs.unflatten", MODELS, name="qwen3", temperature=1.0)
def flat_tokens_put_back_column_by_column(unflatten):
    return lambda values, mask: unflatten(values, mask.T.contiguous()).T


@planted("lmrl.logprobs.fused_logprobs", MODELS, name="qwen3", temperature=0.6)
def temperature_missing_in_the_fused_logprobs(fused_logprobs):
    return lambda *args, **kwargs: fused_logprobs(*args, **kwargs | {"temperature": 1.0})


@planted("lmrl.logprobs.fused_token_loss", UPDATE, loss_type="dapo", settings=CENTRED)
def temperature_missing_in_the_passes_that_train(fused_token_loss):
    return lambda *args, **kwargs: fused_token_loss(*args, **kwargs | {"temperature": 1.0})


@planted("lmrl.trainer.token_loss_of", "test_trainer.py::test_the_blocks_of_the_fused_loss_change_nothing")
def every_block_gets_the_first_tokens(token_loss_of):
    return edited(token_loss_of, "value[rows]", "value[: rows.stop - rows.start]")


@planted("lmrl.trainer.token_loss_of", UPDATE, loss_type="grpo", settings=CENTRED)
def tokens_of_the_loss_column_by_column(token_loss_of):
    return edited(token_loss_of, "value[piece.mask]", "value.T[piece.mask.T]")


# --- aggregation ------------------------------------------------------------------------------------------------------

WEIGHTS = "test_loss.py::test_weights_of_two_answers"
ACCUMULATION = "test_trainer.py::test_accumulation_changes_nothing"


def per_piece(micro_batches, change):
    """Micro-batches whose weights are changed, each on its own: change(weights, number of pieces)."""

    def faulty(*args, **kwargs):
        pieces = list(micro_batches(*args, **kwargs))
        return [(piece, change(weights, len(pieces))) for piece, weights in pieces]

    return faulty


@planted("lmrl.batch.micro_batches", ACCUMULATION, loss_type="dapo", beta=0.0)
@planted("lmrl.batch.micro_batches", UPDATE, loss_type="dapo", settings=CENTRED)
def mean_of_micro_batch_means(micro_batches):
    return per_piece(micro_batches, lambda w, count: w / w.sum().clamp(min=1e-9) / count)


@planted("lmrl.batch.micro_batches", ACCUMULATION, loss_type="grpo", beta=0.0)
def divided_again_by_the_number_of_micro_batches(micro_batches):
    return per_piece(micro_batches, lambda w, count: w / count)


@planted("lmrl.batch.micro_batches", ACCUMULATION, loss_type="dapo", beta=0.05)
def short_last_micro_batch_dropped(micro_batches):
    def faulty(*args, **kwargs):
        pieces = list(micro_batches(*args, **kwargs))
        return [piece for piece in pieces if len(piece[0]) == len(pieces[0][0])]

    return faulty


@planted("lmrl.loss.token_weights", WEIGHTS)
@planted("lmrl.loss.token_weights", "test_claims_11.py::test_claim_11_4_weight_of_a_token_in_a_short_and_a_long_answer")
def sequence_mean_and_token_mean_swapped(token_weights):
    swap = {"grpo": "dapo", "dapo": "grpo"}
    return lambda mask, loss_type, cap: token_weights(mask, swap.get(loss_type, loss_type), cap)


@planted("lmrl.loss.token_weights", WEIGHTS)
def padding_in_the_denominator(token_weights):
    return lambda mask, *_: mask / mask.numel()


@planted("lmrl.loss.token_weights", WEIGHTS)
def batch_width_for_the_length_cap(token_weights):
    return lambda mask, loss_type, _: token_weights(mask, loss_type, mask.shape[1])


@planted("lmrl.loss.token_weights", "test_loss.py::test_rows_without_tokens_leave_the_denominator", loss_type="grpo")
def empty_rows_in_the_denominator(token_weights):
    def faulty(mask, *args):
        return token_weights(mask, *args) * mask.any(1).sum() / len(mask)

    return faulty


@planted("lmrl.loss.token_weights", "test_loss.py::test_a_fully_masked_batch_gives_zero", loss_type="dapo", beta=0.0)
def division_by_an_empty_mask(token_weights):
    return lambda mask, *_: mask / mask.sum()


@planted("lmrl.policy.masked_mean", "test_policy.py::test_masked_mean_ignores_nan_and_empty_masks")
def mean_over_the_padded_tensor(masked_mean):
    return lambda values, mask: torch.where(mask, values, 0.0).mean()


@planted("lmrl.policy.masked_mean", "test_policy.py::test_masked_mean_ignores_nan_and_empty_masks")
def masked_by_multiplication(masked_mean):
    return lambda values, mask: (values * mask).sum() / mask.sum().clamp(min=1)


@planted("lmrl.metrics.summarise", "test_metrics.py::test_token_means_are_over_the_step_not_over_micro_batches")
def metrics_as_mean_of_means(summarise):
    return lambda passes: {
        name: sum(float(m[name][mask].mean()) for m, mask in passes) / len(passes) for name in passes[0][0]
    }


@planted("lmrl.metrics.summarise", "test_metrics.py::test_extremes_are_maxima_and_masked_values_do_not_count")
def metrics_unmasked(summarise):
    return lambda passes: summarise([(metrics, torch.ones_like(mask)) for metrics, mask in passes])


# --- ratio and clip ---------------------------------------------------------------------------------------------------

REGIONS = "test_ppo.py::check_pitfall_23_four_regions"


@planted("lmrl.ppo.importance_ratio", "test_ppo.py::check_pitfall_24_one_ratio_per_token")
@planted("lmrl.ppo.importance_ratio", "test_loss.py::test_token_ratios_are_not_sequence_ratios")
def ratio_inverted(importance_ratio):
    return lambda logprobs, old, *_: importance_ratio(old, logprobs)


@planted("lmrl.ppo.importance_ratio", "test_loss.py::test_token_ratios_are_not_sequence_ratios")
def one_ratio_per_sequence(importance_ratio):
    return lambda logprobs, old, *_: (logprobs - old).sum(-1, keepdim=True).exp().expand_as(logprobs)


@planted("lmrl.ppo.importance_ratio", "test_ppo.py::check_pitfall_24_second_update_has_other_ratios")
@planted("lmrl.ppo.importance_ratio", UPDATE, loss_type="dapo", settings=REFERENCE)
def ratio_always_1(importance_ratio):
    return lambda logprobs, old, *_: importance_ratio(logprobs, logprobs.detach())


@planted("lmrl.trainer.micro_batch_pass", "test_trainer.py::test_second_pass_over_a_batch_has_other_ratios_and_the_same_old_logprobs")  # fmt: skip
@planted("lmrl.trainer.micro_batch_pass", UPDATE, loss_type="grpo", settings=CENTRED)
def old_logprobs_taken_anew_in_every_pass(micro_batch_pass):
    return lambda model, piece, *args: micro_batch_pass(model, replace(piece, old_logprobs=None), *args)


@planted("lmrl.trainer.micro_batch_pass", "test_trainer.py::test_first_ratios_are_exactly_one_and_the_sampler_agrees")
def sampler_logprobs_for_old_ones(micro_batch_pass):
    return lambda model, piece, *args: micro_batch_pass(
        model, replace(piece, old_logprobs=piece.sampler_logprobs), *args
    )


def bounded(ratio, epsilon=0.2, epsilon_high=None):
    return ratio.clamp(1 - epsilon, 1 + (epsilon_high or epsilon))


@planted("lmrl.ppo.clipped_surrogate", REGIONS)
@planted("lmrl.ppo.clipped_surrogate", UPDATE, loss_type="dapo", settings=CENTRED)
def max_for_min_where_the_advantage_is_negative(clipped_surrogate):
    def faulty(ratio, advantages, *epsilons):
        terms = ratio * advantages, bounded(ratio, *epsilons) * advantages
        return torch.where(advantages < 0, torch.maximum(*terms), torch.minimum(*terms))

    return faulty


@planted("lmrl.ppo.clipped_surrogate", REGIONS)
def clip_without_min(clipped_surrogate):
    return lambda ratio, advantages, *epsilons: bounded(ratio, *epsilons) * advantages


@planted("lmrl.ppo.clip_bounds", "test_ppo.py::test_clip_higher_moves_the_upper_edge_only")
@planted("lmrl.ppo.clip_bounds", UPDATE, loss_type="dapo", settings=CENTRED)
def epsilon_high_ignored(clip_bounds):
    return lambda epsilon, epsilon_high=None: clip_bounds(epsilon)


@planted("lmrl.ppo.clip_bounds", "test_ppo.py::test_clip_higher_moves_the_upper_edge_only")
@planted("lmrl.ppo.clip_bounds", "test_claims_10.py::test_claim_10_2_the_four_regions")
def clip_bounds_swapped(clip_bounds):
    return lambda epsilon, epsilon_high=None: clip_bounds(epsilon_high or epsilon, epsilon)


@planted("lmrl.ppo.clipped", "test_ppo.py::check_pitfall_23_clip_fraction")
def clip_metric_without_the_sign(clipped):
    return lambda ratio, advantages, epsilon=0.2, epsilon_high=None: bounded(ratio, epsilon, epsilon_high) != ratio


@planted("lmrl.trainer.token_metrics", "test_trainer.py::test_token_metrics_of_one_token_by_hand")
def clip_metric_of_the_clipped_ratio(token_metrics):
    return edited(token_metrics, "clip_flags(ratio,", "clip_flags(ratio.clamp(0.8, 1.2),")


# --- KL and entropy ---------------------------------------------------------------------------------------------------

KL_NUMBERS = "test_trust_region.py::check_pitfall_18_values_and_derivatives"


@planted("lmrl.trust_region.kl_k3", KL_NUMBERS)
@planted("lmrl.trust_region.kl_k3", "test_claims_09.py::test_claim_14_4_expectations_on_whole_completions")
@planted("lmrl.trust_region.kl_k3", "test_trainer.py::test_token_metrics_of_one_token_by_hand")
def kl_with_the_policies_swapped(kl):
    return lambda logprobs, ref_logprobs: kl(ref_logprobs, logprobs)


@planted("lmrl.trust_region.kl_k3", KL_NUMBERS)
def k3_with_the_sign_of_d_flipped(kl_k3):
    return lambda logprobs, ref_logprobs: torch.expm1(ref_logprobs - logprobs) + ref_logprobs - logprobs


@planted("lmrl.trust_region.kl_k1", KL_NUMBERS)
def k1_with_the_policies_swapped(kl_k1):
    return lambda logprobs, ref_logprobs: kl_k1(ref_logprobs, logprobs)


@planted("lmrl.trust_region.kl_k3", "test_loss.py::test_the_penalty_pulls_towards_the_reference")
@planted("lmrl.trust_region.kl_k3", UPDATE, loss_type="dapo", settings=REFERENCE)
def k1_in_the_loss(kl_k3):
    return lambda logprobs, ref_logprobs: logprobs - ref_logprobs


AS_ONE_ACTION = "test_claims_14.py::test_claim_14_4_a_completion_as_one_action"


@planted("lmrl.trust_region.kl_k2", AS_ONE_ACTION, size=(3, 3, 0, 0))
def k1_as_the_loss_though_k2_was_asked(kl_k2):
    return lambda logprobs, ref_logprobs: logprobs - ref_logprobs


@planted("lmrl.recipes.fused_kl", "test_kl.py::test_the_first_argument_is_the_policy")
def exact_kl_with_the_policies_swapped(fused_kl):
    return lambda hidden, head, ref_hidden, ref_head, *rest: fused_kl(ref_hidden, ref_head, hidden, head, *rest)


@planted("lmrl.recipes.allowed_gap", "test_kl.py::test_forbidden_tokens_have_no_part_in_it", forbidden_by="both")
def zero_times_infinity_for_a_forbidden_token(allowed_gap):
    return lambda logits, ref_logits: logits - ref_logits


@planted("lmrl.recipes.fold_kl", "test_kl.py::test_completion_kl_is_that_of_the_materialised_logits", name="qwen3", temperature=1.0)  # fmt: skip
def exact_kl_weighted_by_the_reference(fold_kl):
    def faulty(logits, ref_logits, sums):
        swapped = sums[[3, 4, 2, 0, 1]]
        fold_kl(ref_logits, logits, swapped)
        sums[[3, 4, 2, 0, 1]] = swapped

    return faulty


@planted("lmrl.recipes.completion_kl", "test_kl.py::test_completion_kl_is_that_of_the_materialised_logits", name="qwen3", temperature=0.6)  # fmt: skip
def exact_kl_without_the_temperature(completion_kl):
    return lambda *args: completion_kl(*args[:-1])


@planted("lmrl.recipes.penalised_rewards", "test_kl.py::test_the_penalty_of_a_row_and_of_a_token")
@planted("lmrl.recipes.penalised_rewards", "test_claims_14.py::test_claim_14_4_token_by_token", size=(3, 3, 0, 0))
def kl_in_the_reward_as_a_mean_over_the_tokens(penalised_rewards):
    return lambda rewards, kl, mask, beta: penalised_rewards(rewards, kl / mask.sum(1, keepdim=True), mask, beta)


@planted("lmrl.recipes.penalised_rewards", "test_claims_14.py::test_claim_14_4_token_by_token", size=(3, 3, 0, 0))
@planted("lmrl.recipes.penalised_token_rewards", "test_claims_14.py::test_claim_14_4_token_by_token", size=(3, 3, 0, 0))
@planted("lmrl.recipes.penalised_token_rewards", "test_kl.py::test_the_penalty_of_a_row_and_of_a_token")
def drift_rewarded(penalised):
    return lambda rewards, kl, mask, beta: penalised(rewards, kl, mask, -beta)


@planted("lmrl.recipes.penalised_token_rewards", "test_claims_14.py::test_claim_14_4_token_by_token", size=(3, 3, 0, 0))
def kl_of_the_last_token_only_in_the_reward(penalised_token_rewards):
    def faulty(token_rewards, kl, mask, beta):
        last = mask & (mask.flip(1).cumsum(1).flip(1) == 1)
        return penalised_token_rewards(token_rewards, kl, last, beta)

    return faulty


@planted("lmrl.loss.policy_loss", "test_loss.py::test_the_penalty_pulls_towards_the_reference")
def kl_rewarded_instead_of_paid_for(policy_loss):
    return lambda *args, beta=0.0, **kwargs: policy_loss(*args, beta=-beta, **kwargs)


@planted("lmrl.loss.policy_loss", "test_loss.py::test_what_is_masked_changes_nothing",
         loss_type="dapo", beta=0.1, filler=1e9)  # fmt: skip
def kl_unmasked(policy_loss):
    def faulty(logprobs, *args, beta=0.0, ref_logprobs=None, **kwargs):
        return policy_loss(logprobs, *args, **kwargs) + beta * (logprobs - ref_logprobs).square().mean()

    return faulty


@planted("lmrl.loss.policy_loss", "test_loss.py::test_what_is_masked_changes_nothing",
         loss_type="grpo", beta=0.0, filler=float("nan"))  # fmt: skip
def masked_after_the_arithmetic(policy_loss):
    def faulty(logprobs, old_logprobs, advantages, weights, **kwargs):
        return -(weights * (logprobs - old_logprobs).exp() * advantages).sum()

    return faulty


@planted("lmrl.trainer.score", UPDATE, loss_type="dapo", settings=REFERENCE)
def temperature_missing_in_the_reference(score):
    return lambda model, rollouts, temperature, *args: score(model, rollouts, 1.0, *args)


@planted("lmrl.trainer.in_pieces", "test_trainer.py::test_scores_stand_where_their_tokens_stand")
@planted("lmrl.trainer.in_pieces", UPDATE, loss_type="dapo", settings=REFERENCE)
def scores_left_in_the_order_of_lengths(in_pieces):
    return edited(in_pieces, "torch.cat(places), column", "torch.cat(places).sort().values, column")


@planted("lmrl.models.load_reference", "test_models.py::test_reference_is_frozen_and_does_not_move_with_the_policy",
         source="model")  # fmt: skip
def reference_is_the_policy_itself(load_reference):
    return lambda source, **kwargs: source


@planted("lmrl.recipes.entropy_slope", "test_claims_14.py::test_claim_14_7_on_a_tree_the_plain_step_carries_the_visits",
         size=(3, 3, 0, 0), natural=False)  # fmt: skip
def natural_law_for_a_plain_step(entropy_slope):
    return lambda log_policy, advantages, natural=False: entropy_slope(log_policy, advantages, natural=True)


@planted("lmrl.recipes.top_entropy", "test_recipes.py::test_top_entropy_by_hand", quantile=0.5, kept=[[1, 0, 1, 0], [1, 1, 0, 0]])  # fmt: skip
def threshold_among_padding_too(top_entropy):
    def faulty(entropies, mask, quantile):
        entropies = entropies.nan_to_num(9.9)
        return top_entropy(entropies, torch.ones_like(mask), quantile) & mask

    return faulty


@planted("lmrl.recipes.top_entropy", "test_recipes.py::test_top_entropy_by_hand", quantile=1 / 3, kept=[[1, 0, 0, 0], [0, 1, 0, 0]])  # fmt: skip
def the_most_certain_tokens_trained(top_entropy):
    return lambda entropies, mask, quantile: top_entropy(-entropies, mask, quantile)


@planted("lmrl.trust_region.entropy", "test_trust_region.py::check_entropy_of_known_policies")
def entropy_with_the_wrong_sign(entropy):
    return then(entropy, torch.neg)


@planted("lmrl.metrics.rollout_metrics", "test_metrics.py::test_rollout_metrics_exact")
def entropy_metric_with_the_wrong_sign(rollout_metrics):
    return then(rollout_metrics, lambda metrics: metrics | {"entropy": -metrics["entropy"]})


@planted("lmrl.trust_region.log_ratio", "test_trust_region.py::test_widening_comes_before_the_subtraction")
def log_ratio_in_half_precision(log_ratio):
    return lambda logprobs, other: (logprobs - other).float()


# --- rewards, baselines and groups ------------------------------------------------------------------------------------

GROUPS = "test_baselines.py::test_groups_are_labels_not_positions"
UNGRADED = "test_baselines.py::test_ungraded_rows_leave_baseline_and_result"
TIES = "test_baselines.py::test_equal_rewards_give_exactly_zero"


def plain_group_advantages(std):
    """Group advantages as they are often written; std(own rewards) is the divisor."""

    def faulty(rewards, group, *, scale="group", graded=None):
        advantages = torch.zeros_like(rewards)
        for label in group.unique():
            own = rewards[group == label]
            advantages[group == label] = (own - own.mean()) / (std(own) if scale == "group" else 1.0)
        return advantages

    return faulty


def scaled(rewards, group, graded=None):
    return importlib.import_module("lmrl.baselines").group_advantages(rewards, group, graded=graded)


def leave_one_out(rewards, group, graded=None):
    return importlib.import_module("lmrl.baselines").leave_one_out_advantages(rewards, group, graded)


@planted("lmrl.baselines.group_advantages", GROUPS)
def statistics_over_the_whole_batch(group_advantages):
    return lambda rewards, group, **kwargs: group_advantages(rewards, torch.zeros_like(group), **kwargs)


@planted("lmrl.baselines.group_advantages", GROUPS)
@planted("lmrl.baselines.group_advantages", "test_trainer.py::test_groups_survive_a_shuffle_of_the_rows")
@planted("lmrl.baselines.group_mean", GROUPS)
def groups_by_row_position(function):
    def faulty(rewards, group, *args, **kwargs):
        position = torch.arange(len(group)) // (len(group) // group.unique().numel())
        return function(rewards, position, *args, **kwargs)

    return faulty


@planted("lmrl.baselines.group_advantages", "test_baselines.py::test_population_std")
def sample_standard_deviation(group_advantages):
    return plain_group_advantages(torch.std)


@planted("lmrl.baselines.group_advantages", TIES, advantages_of=scaled, size=8, dtype=torch.float32)
def ties_made_huge_by_an_epsilon(group_advantages):
    return plain_group_advantages(lambda own: own.std(correction=0) + 1e-8)


@planted("lmrl.baselines.group_advantages", "test_baselines.py::test_only_equality_makes_a_tie", advantages_of=scaled)
@planted("lmrl.baselines.group_advantages", "test_baselines.py::test_scale_needs_no_epsilon")
def groups_dropped_by_a_small_std(group_advantages):
    def faulty(rewards, group, **kwargs):
        spread = torch.stack([rewards[group == label].std() for label in group])
        return torch.where(spread > 1e-4, group_advantages(rewards, group, **kwargs), 0.0)

    return faulty


@planted("lmrl.baselines.group_advantages", "test_baselines.py::test_scale_needs_no_epsilon")
def epsilon_added_to_the_divisor(group_advantages):
    return plain_group_advantages(lambda own: own.std(correction=0) + 1e-4)


@planted("lmrl.signal.tied_groups", "test_signal.py::check_equal_rewards_are_tied_whatever_their_float_std")
def ties_by_a_float_std(tied_groups):
    return lambda rewards, group, graded=None: torch.stack(
        [rewards[group == label].std(correction=0) == 0 for label in group.unique()]
    )


@planted("lmrl.baselines.group_advantages", UNGRADED)
@planted("lmrl.baselines.leave_one_out_advantages", UNGRADED)
@planted("lmrl.baselines.group_mean", UNGRADED)
def none_counted_as_reward_0(function):
    return lambda rewards, group, graded=None, **kwargs: function(rewards.nan_to_num(0.0), group, **kwargs)


@planted("lmrl.rewards.checked_scores", "test_rewards.py::test_what_a_function_does_to_its_arguments_stays_with_it")
def a_reward_gets_the_tasks_own_lists(checked_scores):
    return edited(checked_scores, "copy.deepcopy(", "dict(")


@planted("lmrl.checkpoint.fingerprints", "test_checkpoint.py::test_other_prompts_or_another_reference_are_refused_and_change_nothing")  # fmt: skip
def other_answers_are_taken(fingerprints):
    return edited(fingerprints, '"answers or other columns": columns', '"answers or other columns": None')


@planted("lmrl.rewards.score_completions", "test_rewards.py::test_none_is_nan_and_not_graded")
@planted("lmrl.rewards.score_completions", "test_rewards.py::test_pitfall_11_none_leaves_the_baseline")
def none_graded_0(score_completions):
    return then(score_completions, lambda scored: (scored[0].nan_to_num(0.0), torch.ones_like(scored[1])))


@planted("lmrl.baselines.leave_one_out_advantages", GROUPS)
@planted("lmrl.baselines.leave_one_out_advantages", "test_claims_06.py::test_claim_6_4_the_mean_with_the_sample_itself_shortens_the_gradient", G=3, seed=2)  # fmt: skip
def leave_one_out_that_includes_itself(leave_one_out_advantages):
    def faulty(rewards, group, graded=None):
        count = (group[:, None] == group).sum(1)
        return leave_one_out_advantages(rewards, group, graded) * (count - 1) / count

    return faulty


@planted("lmrl.trainer.grade", "test_trainer.py::test_each_completion_is_graded_with_its_own_prompt")
def completions_graded_with_another_prompt(grade):
    return lambda rollouts, tokens, examples, reward: grade(rollouts, tokens, examples[::-1], reward)


@planted("lmrl.tree.terminal_returns", "test_tree.py::test_returns_by_hand")
def reward_to_go_without_gamma(terminal_returns):
    return lambda rewards, mask, gamma=1.0: terminal_returns(rewards, mask)


@planted("lmrl.tree.terminal_returns", "test_tree.py::test_returns_by_hand")
def gamma_counts_from_the_start(terminal_returns):
    def faulty(rewards, mask, gamma=1.0):
        return torch.where(mask, rewards[:, None] * gamma ** (mask.cumsum(-1) - 1), 0.0)

    return faulty


@planted("lmrl.signal.pass_at_k", "test_signal.py::check_pass_at_k_is_the_share_of_choices_with_a_right_one")
def pass_at_k_from_the_estimated_rate(pass_at_k):
    return lambda correct, samples, k: 1 - (1 - torch.as_tensor(correct, dtype=torch.float64) / samples) ** k


@planted("lmrl.signal.mixed_rows", "test_signal.py::check_dynamic_sampling_fills_the_batch_with_mixed_groups_in_order")
def groups_kept_for_their_mean_reward(mixed_rows):
    def faulty(rewards, group, graded=None):
        means = torch.stack([rewards[group == label].mean() for label in group])
        return means > 0

    return faulty


# --- values and GAE ---------------------------------------------------------------------------------------------------


@planted("lmrl.gae.td_errors", "test_gae.py::test_padding_does_not_leak", padding=100.0)
@planted("lmrl.gae.td_errors", "test_gae.py::test_masked_numbers_change_nothing", seed=0, gamma=1.0, lam=0.95)
def values_of_the_padding_read(td_errors):
    def faulty(rewards, values, mask, *, gamma, bootstrap=None):
        following = torch.cat([values[:, 1:], torch.zeros_like(values[:, :1])], 1)
        return rewards + gamma * following - values

    return faulty


@planted("lmrl.gae.gae", "test_gae.py::test_padding_does_not_leak", padding=100.0)
def advantages_leak_past_the_end(gae):
    return lambda rewards, values, mask, **kwargs: gae(rewards, values, torch.ones_like(mask), **kwargs)


@planted("lmrl.gae.score_last_token", "test_gae.py::test_the_score_is_on_the_last_token")
def final_score_one_token_late(score_last_token):
    return then(score_last_token, lambda rewards: rewards.roll(1, 1))


@planted("lmrl.gae.score_last_token", "test_gae.py::test_the_score_is_on_the_last_token")
def final_score_in_the_last_column(score_last_token):
    return lambda scores, mask, *args: score_last_token(scores, torch.ones_like(mask), *args)


@planted("lmrl.gae.split_values", "test_gae.py::test_truncated_rows_bootstrap")
def bootstrap_missing_for_truncated_rows(split_values):
    return lambda values, mask, truncated: split_values(values, mask, torch.zeros_like(truncated))


@planted("lmrl.gae.split_values", "test_gae.py::test_truncated_rows_bootstrap")
def finished_rows_bootstrap_too(split_values):
    return lambda values, mask, truncated: split_values(values, mask, torch.ones_like(truncated))


@planted("lmrl.gae.score_last_token", "test_gae.py::test_a_row_that_bootstraps_gets_no_score")
def score_and_bootstrap_both(score_last_token):
    return lambda scores, mask, bootstrapped=None: score_last_token(scores, mask)


@planted("lmrl.gae.gae", "test_gae.py::test_returns_are_not_rewards")
def returns_for_advantages(gae):
    return then(gae, lambda pair: (pair[1], pair[1]))


@planted("lmrl.gae.gae", "test_gae.py::test_returns_are_not_rewards")
def rewards_for_returns(gae):
    return lambda rewards, *args, **kwargs: (gae(rewards, *args, **kwargs)[0], rewards)


@planted("lmrl.ppo.value_loss", "test_ppo.py::check_pitfall_26_value_loss")
def value_clip_on_the_difference(value_loss):
    return lambda values, old, returns, clip=0.2: (values - returns).clamp(-clip, clip).square() / 2


@planted("lmrl.ppo.value_clipped", "test_ppo.py::check_pitfall_26_value_metric")
def value_metric_of_the_clipped_value(value_clipped):
    return lambda values, old, clip=0.2: value_clipped(old + (values - old).clamp(-clip, clip), old, clip)


@planted("lmrl.values.whiten", "test_values.py::test_whitening_ignores_padding")
def whitening_with_the_padding(whiten):
    return lambda advantages, mask: torch.where(mask, whiten(advantages, torch.ones_like(mask)), 0.0)


@planted("lmrl.values.whiten", "test_values.py::test_whitening_uses_the_population_standard_deviation")
def whitening_with_n_minus_1(whiten):
    return lambda advantages, mask: whiten(advantages, mask) * (1 - 1 / mask.sum()).sqrt()


@planted("lmrl.values.monte_carlo_outcomes", "test_values.py::test_monte_carlo_values_leave_the_sample_itself_out")
def monte_carlo_value_with_the_sample_itself(monte_carlo_outcomes):
    def faulty(model, prompt_ids, prompt_mask, ids, mask, score, **kwargs):
        outcomes = monte_carlo_outcomes(model, prompt_ids, prompt_mask, ids, mask, score, **kwargs)
        lengths = mask.sum(1)
        own = score(torch.arange(len(ids)), ids, lengths, lengths == mask.shape[1])
        outcomes[..., 0] = torch.where(mask, own.to(outcomes)[:, None], 0.0)
        return outcomes

    return faulty


@planted("lmrl.values.Critic.forward", "test_values.py::test_critic_has_one_value_for_every_state",
         build=lambda: importlib.import_module("test_values").gpt2())  # fmt: skip
def critic_values_one_token_late(forward):
    return edited(forward, "prompt_ids.shape[1] - 1 :", "prompt_ids.shape[1] - 2 : -1")


# --- the training loop ------------------------------------------------------------------------------------------------

RATES = "test_trainer.py::test_every_step_has_its_own_seed_and_learning_rate_and_tells_the_sampler"


@planted("lmrl.trainer.Trainer.learn", ACCUMULATION, loss_type="dapo", beta=0.0)
def optimizer_stepped_per_micro_batch(learn):
    return edited(learn, "piece_loss.backward()", "piece_loss.backward(); self.learner.step()")


@planted("lmrl.trainer.Trainer.learn", ACCUMULATION, loss_type="dapo", beta=0.0)
def gradient_clipped_per_micro_batch(learn):
    clip = "torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1e-3)"
    return edited(learn, "piece_loss.backward()", f"piece_loss.backward(); {clip}")


@planted("lmrl.trainer.Learner.step", UPDATE, loss_type="dapo", settings=CENTRED)
def gradient_not_clipped(step):
    return edited(step, "self.config.max_grad_norm", "1e9")


@planted("lmrl.trainer.Learner.zero_grad", UPDATE, loss_type="dapo", settings=CENTRED)
def gradients_of_the_last_pass_kept(zero_grad):
    return lambda self: None


@planted("lmrl.trainer.Learner.step", UPDATE, loss_type="dapo", settings=CENTRED)
def learning_rate_schedule_stepped_per_iteration(step):
    return edited(step, "self.optimizer.step()", "self.optimizer.step(); self.start(1)")


OPTIONS = "test_trainer_options.py::"


@planted("lmrl.trainer.Learner.step", OPTIONS + "test_a_gradient_that_is_not_finite_changes_nothing")
def step_along_a_gradient_that_is_not_finite(step):
    return edited(step, "if math.isfinite(norm):", "if True:")


@planted(
    "lmrl.trainer.Learner.round", OPTIONS + "test_master_weights_are_those_of_a_float32_model_and_small_steps_add_up"
)
@planted("lmrl.trainer.Learner.round", OPTIONS + "test_a_run_in_bfloat16_with_master_weights")
def master_weights_read_back_from_the_rounded_ones(round):
    return edited(round, "weight.copy_(master)", "weight.copy_(master); master.copy_(weight)")


@planted("lmrl.trainer.Learner.step", OPTIONS + "test_float16_sees_small_gradients_and_their_true_norm")
def gradient_clipped_before_the_loss_scale_is_taken_out(step):
    return edited(step, ".div_(self.scale)", "")  # AdamW alone would not notice


@planted("lmrl.trainer.Trainer.learn", OPTIONS + "test_float16_sees_small_gradients_and_their_true_norm")
def loss_scaled_after_the_fused_loss_has_rounded_its_gradients(learn):
    after = "config, self.reference)\n        "
    return edited(
        learn, f"weights * scale, {after}piece_loss.backward()", f"weights, {after}(piece_loss * scale).backward()"
    )


PARTS = OPTIONS + "test_mini_batches_are_steps_on_parts_of_the_batch"


@planted("lmrl.trainer.needs_old_logprobs", PARTS, loss_type="dapo")
def old_logprobs_taken_after_the_first_mini_batch(needs_old_logprobs):
    return lambda config: needs_old_logprobs(replace(config, num_mini_batches=1))


@planted("lmrl.trainer.mini_batches", PARTS, loss_type="dapo")
def mini_batches_normalised_over_the_whole_batch(mini_batches):
    return edited(mini_batches, "weights[trained]", "weights[trained] / config.num_mini_batches")


@planted("lmrl.trainer.token_advantages", OPTIONS + "test_whitened_advantages_have_mean_0_and_deviation_1_over_the_tokens_of_the_loss", masked=True)  # fmt: skip
def whitening_over_tokens_that_are_not_trained(token_advantages):
    return edited(token_advantages, "loss_mask(rollouts, config.mask_truncated_completions)", "mask")


@planted("lmrl.models.merged", "test_lora.py::test_pitfall_21_base_weights_are_bit_identical_after_100_syncs")
def adapter_merged_in_place_and_taken_out_again(merged):
    def faulty(model):
        layers = importlib.import_module("lmrl.models").adapted_layers(model).values()
        plain = merged(model)
        for layer in layers:
            layer.merge()
            layer.unmerge()
        return plain

    return faulty


@planted("lmrl.models.copy_what_learns", "test_lora.py::test_pitfall_21_the_kl_starts_at_zero_whatever_the_adapter_had_learned",
         start=lambda: importlib.import_module("test_lora").trained(importlib.import_module("test_lora").adapted()))  # fmt: skip
def reference_with_the_adapter_switched_off(copy_what_learns):
    def faulty(module, model):
        copied = copy_what_learns(module, model)
        for layer in importlib.import_module("lmrl.models").adapted_layers(copied).values():
            layer.enable_adapters(False)
        return copied

    return faulty


@planted("lmrl.trainer.move_reference", OPTIONS + "test_the_reference_follows_the_policy_by_its_share", alpha=0.3)
def reference_and_policy_with_each_others_shares(move_reference):
    return lambda reference, model, alpha: move_reference(reference, model, 1 - alpha)


@planted("lmrl.trainer.Trainer.update", OPTIONS + "test_target_kl_leaves_the_batch_before_the_step_that_is_too_far")
def batch_left_one_step_late(update):
    return edited(update, "self.config.target_kl if steps", "self.config.target_kl if len(steps) > 3")


@planted("lmrl.trainer.learning_rate_factor", "test_trainer.py::test_learning_rate_schedule")
def learning_rate_decays_to_zero_one_step_early(learning_rate_factor):
    return lambda step, config: learning_rate_factor(step + 1, config)


@planted("lmrl.batch.micro_batches", ACCUMULATION, loss_type="dapo", beta=0.0)
def advantages_per_micro_batch(micro_batches):
    whiten = importlib.import_module("lmrl.values").whiten

    def faulty(*args, **kwargs):
        for piece, weights in micro_batches(*args, **kwargs):
            yield replace(piece, advantages=whiten(piece.advantages, piece.mask)), weights

    return faulty


@planted("lmrl.trainer.rows_with_gradient", "test_trainer.py::test_rows_with_gradient")
@planted("lmrl.trainer.rows_with_gradient", "test_trainer.py::test_rows_without_gradient_may_be_left_out", beta=0.05)
def rows_without_advantage_skipped_despite_the_kl(rows_with_gradient):
    return lambda rollouts, weights, config: rows_with_gradient(rollouts, weights, replace(config, beta=0.0))


@planted("lmrl.trainer.Trainer.step", RATES)
def sampler_never_synced(step):
    return edited(step, "self.sampler.sync(self.model)", "pass")


@planted("lmrl.trainer.Trainer.step", RATES)
def sampler_synced_before_the_update(step):
    return edited(step, "learning = self.update(rollouts)", "self.sampler.sync(self.model); learning = self.update(rollouts)")  # fmt: skip


@planted("lmrl.rollout.TorchSampler.generate", "test_rollout.py::test_sampling_sees_new_weights_without_a_sync")
def sampler_with_stale_weights(generate):
    kept = {}

    def faulty(self, *args, **kwargs):
        model = kept.setdefault(id(self.model), copy.deepcopy(self.model))
        return generate(replace(self, model=model), *args, **kwargs)

    return faulty


@planted("lmrl.trainer.Trainer.next_sampling_seed", RATES)
def the_same_sampling_seed_in_every_step(next_sampling_seed):
    return lambda trainer: 0


@planted("lmrl.trainer.collect", "test_trainer.py::test_pitfall_6_the_engines_ids_are_scored_not_their_text")
def completions_decoded_and_tokenised_again(collect):
    def faulty(sampler, tokens, *args):
        rollouts = collect(sampler, tokens, *args)
        ids = torch.zeros_like(rollouts.completion_ids)
        for row, mask in enumerate(rollouts.mask):
            text = tokens.decode(rollouts.completion_ids[row, mask])
            again = tokens(text, add_special_tokens=False).input_ids
            ids[row, : len(again)] = torch.tensor(again)[: ids.shape[1]]
        return replace(rollouts, completion_ids=ids)

    return faulty


@planted("lmrl.trainer.Trainer.draw", "test_trainer.py::test_training_asks_only_training_prompts_and_evaluation_only_heldout_ones")  # fmt: skip
def heldout_problems_trained_on(draw):
    return edited(draw, "self.task.train[i]", "(self.task.train + self.task.heldout)[-1 - i]")


@planted("lmrl.trainer.measure", "test_trainer.py::test_training_asks_only_training_prompts_and_evaluation_only_heldout_ones")  # fmt: skip
def evaluation_on_training_problems(measure):
    return edited(measure, "task.heldout[: config", "task.train[: config")


@planted("lmrl.policy.addition_problems", "test_policy.py::test_split_is_by_unordered_pair_and_complete", seed=0)
def heldout_sums_in_training_the_other_way_round(addition_problems):
    def faulty(*args, **kwargs):
        train, heldout = addition_problems(*args, **kwargs)
        moved = [p for p in heldout if p.a < p.b]
        return train + moved, [p for p in heldout if p not in set(moved)]

    return faulty


@planted("lmrl.tasks.disjoint", "test_tasks.py::test_disjoint_keeps_every_question_once_and_holds_out_at_most_a_quarter")  # fmt: skip
def heldout_questions_in_training(disjoint):
    def faulty(train, heldout, shown):
        _, held = disjoint(train, heldout, shown)
        return {entry["question"]: entry for entry in train}, held

    return faulty


@planted("lmrl.tasks.encode_prompt", "test_tasks.py::test_one_bos_without_a_template", prompt="12+34=")
def prompt_with_two_bos(encode_prompt):
    return lambda tokens, prompt: [tokens.bos_token_id, *encode_prompt(tokens, prompt)]


# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_the_check_sees_the_fault(fault, request, monkeypatch):
    check = fault.check.bound(request)
    plant(monkeypatch, fault)
    with pytest.raises(AssertionError):
        check()


@pytest.mark.parametrize("check", {repr(fault.check): fault.check for fault in FAULTS}.values(), ids=str)
def test_the_check_passes_without_a_fault(check, request):
    check.bound(request)()


# --- the recipes' settings in the trainer -------------------------------------------------------------------------------

PPO = "test_trainer_recipes.py::test_ppo_is_gae_and_the_value_loss_written_out"


@planted("lmrl.trainer.completion_advantages",
         "test_trainer_recipes.py::test_the_kl_in_the_reward_is_taken_from_the_whole_completion_before_the_baseline")  # fmt: skip
def drift_from_the_reference_is_paid_for(completion_advantages):
    return edited(completion_advantages, "kl_k1(rollouts.old_logprobs, rollouts.ref_logprobs)", "kl_k1(rollouts.ref_logprobs, rollouts.old_logprobs)")  # fmt: skip


@planted("lmrl.trainer.token_advantages", PPO, settings={})
def a_truncated_row_gets_its_reward_and_bootstraps(token_advantages):
    return edited(token_advantages, "None if bootstrap is None else rollouts.truncated", "None")


@planted("lmrl.trainer.token_advantages", PPO, settings={})
def truncated_rows_end_like_finished_ones(token_advantages):
    return edited(token_advantages, "gamma=config.gamma, lam=lam, bootstrap=bootstrap", "gamma=config.gamma, lam=lam")


@planted("lmrl.trainer.critic_pass", PPO, settings={})
def the_critics_loss_is_a_mean_of_its_micro_batch(critic_pass):
    return edited(critic_pass, "(weights * losses).sum()", "losses.mean()")


ON_ONE_TRUNK = "test_trainer_recipes.py::test_on_a_shared_trunk_the_step_is_the_gradient_of_the_sum"


@planted("lmrl.trainer.Trainer.add_value_gradients", ON_ONE_TRUNK, vf_coef=0.1, rows=32)
def the_values_pull_at_the_head_alone(add_value_gradients):
    backward = "torch.autograd.backward(loss, inputs=list(self.critic.head.parameters()))"
    return edited(add_value_gradients, "loss.backward()", backward)


@planted("lmrl.trainer.Trainer.__init__", OPTIONS + "test_one_optimiser_has_the_policy_and_the_head_once")
def the_head_is_in_no_optimiser(init):
    return edited(init, "torch.nn.ModuleList([model, self.own_critic])", "model")


@planted("lmrl.trainer.finish", "test_trainer_recipes.py::test_endings_fill_what_was_left_and_no_more")
def endings_longer_than_what_was_left(finish):
    return edited(finish, "text[: config.max_completion_length]", "text")


@planted(
    "lmrl.trainer.weighted_loss", "test_trainer_recipes.py::test_the_entropy_bonus_has_the_gradient_of_the_entropy"
)
def entropy_punished(weighted_loss):
    return edited(weighted_loss, "loss - config.entropy_coef", "loss + config.entropy_coef")


@planted(
    "lmrl.trainer.adjust_advantages", "test_trainer_recipes.py::test_only_tokens_of_high_entropy_keep_their_advantage"
)
def tokens_of_low_entropy_trained(adjust_advantages):
    return edited(adjust_advantages, "top_entropy(entropy,", "top_entropy(-entropy,")


@planted("lmrl.trainer.Trainer.gather",
         "test_trainer_recipes.py::test_dynamic_sampling_reports_what_was_drawn_and_trains_on_what_is_mixed")  # fmt: skip
def metrics_of_the_mixed_groups_alone(gather):
    return edited(gather, "return [], batch.drawn,", "return [], batch.rollouts,")


@planted("lmrl.trainer.rows_with_gradient",
         "test_trainer_recipes.py::test_rows_without_gradient_may_be_left_out_whatever_the_settings", name="critic")  # fmt: skip
def the_critic_skips_rows_without_advantage(rows_with_gradient):
    return edited(rows_with_gradient, 'config.advantage_estimator == "gae"', "False")


@planted(
    "lmrl.trainer.adjust_advantages",
    "test_trainer_recipes.py::test_the_correction_weighs_the_advantages",
    mode="token_mask",
)
def the_correction_upside_down(adjust_advantages):
    return edited(adjust_advantages, "rollouts.old_logprobs, rollouts.sampler_logprobs", "rollouts.sampler_logprobs, rollouts.old_logprobs")  # fmt: skip


# --- the mismatch between sampler and trainer -------------------------------------------------------------------------

WEIGHTS = "test_mismatch.py::test_the_weights_of_four_modes"
METRICS = "test_mismatch.py::test_the_metrics_written_out"


@planted("lmrl.mismatch.sampler_gap", WEIGHTS)
@planted("lmrl.mismatch.sampler_gap", METRICS)
@planted("lmrl.mismatch.sampler_gap",
         "test_claims_14.py::test_claim_14_6_the_ratio_of_completions_has_mean_1_and_corrects_exactly",
         size=(3, 3, 0, 0), distance=0.7)  # fmt: skip
def the_correction_inverted(sampler_gap):
    return lambda old, sampler, mask: sampler_gap(sampler, old, mask)


@planted("lmrl.mismatch.sampler_gap", "test_mismatch.py::test_nothing_leaks_out_of_the_padding", mode="sequence_mask")
def padding_in_the_correction(sampler_gap):
    return lambda old, sampler, mask: sampler_gap(old, sampler, torch.ones_like(mask))


@planted("lmrl.mismatch.sampler_gap",
         "test_mismatch.py::test_weights_carry_no_gradient_and_are_at_least_float32",
         dtype=torch.bfloat16, expected=torch.float32)  # fmt: skip
def the_gap_in_bf16(sampler_gap):
    return edited(sampler_gap, "log_ratio(old_logprobs.detach(), sampler_logprobs.detach())", "old_logprobs.detach() - sampler_logprobs.detach()")  # fmt: skip


@planted("lmrl.mismatch.sampler_gap",
         "test_mismatch.py::test_weights_carry_no_gradient_and_are_at_least_float32",
         dtype=torch.float32, expected=torch.float32)  # fmt: skip
def a_gradient_through_the_correction(sampler_gap):
    return edited(sampler_gap, "old_logprobs.detach()", "old_logprobs")


@planted("lmrl.mismatch.correction_weights", WEIGHTS)
@planted("lmrl.mismatch.correction_weights",
         "test_claims_14.py::test_claim_14_6_the_ratio_of_completions_has_mean_1_and_corrects_exactly",
         size=(3, 3, 0, 0), distance=0.1)  # fmt: skip
def the_weight_of_a_completion_is_the_mean_of_its_tokens(correction_weights):
    return edited(correction_weights, "gap.sum(-1, keepdim=True)", "gap.sum(-1, keepdim=True) / mask.sum(-1, keepdim=True)")  # fmt: skip


@planted("lmrl.mismatch.correction_weights", WEIGHTS)
def the_gap_is_not_exponentiated(correction_weights):
    return edited(correction_weights, "gap.exp()", "1 + gap")


@planted(
    "lmrl.mismatch.correction_weights",
    "test_mismatch.py::test_a_ratio_at_the_cap_stays_and_padding_weighs_1",
    mode="sequence_mask",
)
def padding_gets_the_weight_of_its_row(correction_weights):
    return edited(correction_weights, "torch.where(mask, bound(gap.exp(), cap), 1.0)", "bound(gap.exp(), cap).expand(mask.shape)")  # fmt: skip


def with_bound(modes, kind, bound):
    return {name: (level, bound if name.endswith(kind) else known) for name, (level, known) in modes.items()}


@planted("lmrl.mismatch.CORRECTION_MODES", WEIGHTS)
def weights_raised_to_the_cap(modes):
    return with_bound(modes, "truncate", lambda ratio, cap: ratio.clamp(min=cap))


@planted("lmrl.mismatch.CORRECTION_MODES", WEIGHTS)
def masked_below_the_cap(modes):
    return with_bound(modes, "mask", lambda ratio, cap: torch.where(ratio < cap, 0.0, ratio))


@planted("lmrl.mismatch.CORRECTION_MODES", WEIGHTS)
def masked_weights_become_1(modes):
    return with_bound(modes, "mask", lambda ratio, cap: torch.where(ratio > cap, 1.0, ratio))


@planted(
    "lmrl.mismatch.CORRECTION_MODES",
    "test_mismatch.py::test_a_ratio_at_the_cap_stays_and_padding_weighs_1",
    mode="token_mask",
)
def masked_at_the_cap(modes):
    return with_bound(modes, "mask", lambda ratio, cap: torch.where(ratio >= cap, 0.0, ratio))


@planted("lmrl.mismatch.CORRECTION_MODES", WEIGHTS)
@planted("lmrl.mismatch.CORRECTION_MODES",
         "test_claims_14.py::test_claim_14_6_the_cap_trades_bias_for_variance", size=(3, 3, 0, 0))  # fmt: skip
def masking_truncates(modes):
    return with_bound(modes, "mask", modes["token_truncate"][1])


@planted("lmrl.mismatch.mismatch_metrics", METRICS)
@planted("lmrl.mismatch.mismatch_metrics",
         "test_mismatch.py::test_pitfall_2_the_arithmetic_mean_is_blind_and_the_geometric_one_is_not", seed=0)  # fmt: skip
def the_arithmetic_mean_reported_as_geometric(mismatch_metrics):
    return edited(mismatch_metrics, "tokens.mean().exp()", "tokens.exp().mean()")


@planted("lmrl.mismatch.mismatch_metrics", METRICS)
def the_largest_gap_with_its_sign(mismatch_metrics):
    return edited(mismatch_metrics, "tokens.abs().max()", "tokens.max()")


@planted("lmrl.mismatch.mismatch_metrics", METRICS)
def the_mean_gap_cancels(mismatch_metrics):
    return edited(mismatch_metrics, "tokens.abs().mean()", "tokens.mean().abs()")


@planted("lmrl.mismatch.mismatch_metrics", METRICS)
def the_sample_size_of_tokens(mismatch_metrics):
    return edited(mismatch_metrics, "gap.sum(-1)[mask.any(-1)]", "gap[mask]")


@planted("lmrl.mismatch.mismatch_metrics", "test_mismatch.py::test_a_row_without_tokens_is_no_completion")
def rows_without_tokens_counted(mismatch_metrics):
    return edited(mismatch_metrics, "gap.sum(-1)[mask.any(-1)]", "gap.sum(-1)")


@planted("lmrl.mismatch.mismatch_alarm", "test_mismatch.py::test_the_alarm_hangs_on_the_geometric_mean", ratio=0.89, alarms=True)  # fmt: skip
@planted("lmrl.mismatch.mismatch_alarm", "test_mismatch.py::test_pitfall_2_the_arithmetic_mean_is_blind_and_the_geometric_one_is_not", seed=0)  # fmt: skip
def the_alarm_hangs_on_the_arithmetic_mean(mismatch_alarm):
    return edited(mismatch_alarm, "mismatch/ratio_geometric", "mismatch/ratio_arithmetic")


@planted("lmrl.mismatch.mismatch_alarm", "test_mismatch.py::test_the_alarm_hangs_on_the_geometric_mean", ratio=float("nan"), alarms=True)  # fmt: skip
def a_nan_raises_no_alarm(mismatch_alarm):
    return edited(mismatch_alarm, "if low <= ratio <= high:", "if not (ratio < low or ratio > high):")


# --- a run that goes on -------------------------------------------------------------------------------------------------

RESUMED = "test_checkpoint.py::test_a_restored_trainer_takes_the_same_steps"


def forgetting(restore, line):
    return edited(restore, line, "pass")


@planted("lmrl.checkpoint.load_optimizer", "test_checkpoint.py::test_pitfall_22_forgotten_moments_end_elsewhere")
@planted("lmrl.checkpoint.load_optimizer", RESUMED, name="grpo")
def the_moments_are_forgotten(load_optimizer):
    return lambda optimizer, tensors: None


@planted("lmrl.checkpoint.load_optimizer", RESUMED, name="grpo")
def the_count_of_steps_is_forgotten(load_optimizer):
    """Adam's correction for having begun at zero starts again."""
    return edited(load_optimizer, "value.clone()", 'value.clone() if name != "step" else torch.zeros(())')


@planted("lmrl.checkpoint.restore", RESUMED, name="grpo")
@planted("lmrl.checkpoint.restore", "test_checkpoint.py::test_pitfall_22_no_prompt_is_asked_twice_or_left_out", stop=2)
def the_pass_over_the_data_starts_again(restore):
    return forgetting(restore, 'trainer.batches.waiting = tensors["data.waiting"].tolist()')


@planted("lmrl.checkpoint.restore", RESUMED, name="grpo")
@planted("lmrl.checkpoint.restore", "test_checkpoint.py::test_pitfall_22_no_prompt_is_asked_twice_or_left_out", stop=5)
def the_generator_of_the_data_is_forgotten(restore):
    return forgetting(restore, 'trainer.batches.generator.set_state(tensors["data.generator"])')


@planted("lmrl.checkpoint.restore", RESUMED, name="grpo")
def the_generator_of_the_sampling_is_forgotten(restore):
    return forgetting(restore, 'trainer.sampling.set_state(tensors["sampling.generator"])')


@planted("lmrl.checkpoint.restore", RESUMED, name="grpo")
def the_learning_rate_starts_again(restore):
    return forgetting(restore, 'trainer.steps_done = record["step"]')


@planted("lmrl.checkpoint.restore", "test_checkpoint.py::test_the_sampler_is_told_of_the_weights")
def the_engine_keeps_the_old_weights(restore):
    return forgetting(restore, "trainer.sampler.sync(trainer.model)")


@planted("lmrl.checkpoint.restore", RESUMED, name="ppo")
def the_critic_starts_again(restore):
    return forgetting(restore, 'trainer.own_critic.load_state_dict(part("critic"))')


@planted("lmrl.checkpoint.restore", RESUMED, name="ppo")
def the_moments_of_the_critic_are_forgotten(restore):
    return forgetting(restore, 'load_learner(trainer.critic_learner, part("critic_learner"))')


@planted("lmrl.checkpoint.load_learner", RESUMED, name="bfloat16 with masters")
def masters_made_anew_of_rounded_weights(load_learner):
    return edited(load_learner, "master.copy_", "(lambda saved: master.copy_(saved.bfloat16()))")


@planted(
    "lmrl.checkpoint.load_learner", "test_checkpoint.py::test_the_loss_scale_and_the_counts_of_skipped_steps_are_kept"
)
def the_loss_scale_starts_again(load_learner):
    return edited(load_learner, "learner.scale, *counts", "_, *counts")


TORN = "test_checkpoint.py::test_a_damaged_file_is_named_and_the_checkpoint_before_it_is_taken"


@planted("lmrl.checkpoint.damage", TORN, file="model.safetensors", fault="torn")
@planted("lmrl.checkpoint.damage", TORN, file="trainer/state.safetensors", fault="one bit flipped")
def a_torn_file_is_taken(damage):
    return edited(damage, "sums.get(name) != sha256(checkpoint / name)", "False")


@planted("lmrl.checkpoint.damage", TORN, file="tokenizer.json", fault="missing")
def a_missing_file_is_taken(damage):
    return edited(damage, "{RECORD, TENSORS, *sums, *present}", "present")


@planted("lmrl.checkpoint.damage", "test_checkpoint.py::test_a_list_of_sums_that_ends_early_or_is_empty_is_not_taken")
def files_without_a_sum_are_taken(damage):
    return edited(damage, "sums.get(name) !=", "name in sums and sums[name] !=")


@planted("lmrl.checkpoint.prune_checkpoints", "test_checkpoint.py::test_the_newest_and_the_best_are_kept")
def the_best_checkpoint_is_removed(prune_checkpoints):
    return edited(prune_checkpoints, "if checkpoint != best:", "if True:")


@planted("lmrl.checkpoint.prune_checkpoints", "test_checkpoint.py::test_the_newest_and_the_best_are_kept")
def the_oldest_checkpoints_are_kept(prune_checkpoints):
    return edited(prune_checkpoints, "[: -limit if limit else 0]", "[limit or 99 : -1]")


@planted("lmrl.checkpoint.changed_settings", "test_checkpoint.py::test_what_makes_another_run_is_refused_with_both_values",
         name="seed", value=1)  # fmt: skip
def any_setting_may_change(changed_settings):
    return edited(changed_settings, "if name not in MAY_CHANGE", "if False")


@planted(
    "lmrl.checkpoint.fingerprints",
    "test_checkpoint.py::test_other_prompts_or_another_reference_are_refused_and_change_nothing",
)
def another_reference_is_taken(fingerprints):
    return edited(fingerprints, "if trainer.reference is not None and not trainer.config.sync_ref_model:", "if False:")


# --- failures of the user's code, and two processes (section 16) -------------------------------------------------------

COSTS_NO_STEP = "test_resume.py::test_a_reward_function_costs_no_step_whatever_it_does"
AT_A_SAVE, IN_A_STEP = {"call": 7, "kept": 4, "logged": 4}, {"call": 9, "kept": 5, "logged": 5}


@planted("lmrl.trainer.take_steps", COSTS_NO_STEP, **AT_A_SAVE, fault="killed")
def measured_before_it_is_saved(take_steps):
    return edited(
        take_steps, "save_checkpoint(trainer, folder)\n", "evaluate(trainer); save_checkpoint(trainer, folder)\n"
    )


@planted("lmrl.trainer.is_unmeasured", COSTS_NO_STEP, **AT_A_SAVE, fault="raises")
def what_was_left_unmeasured_stays_so(is_unmeasured):
    return lambda *arguments: False


@planted("lmrl.checkpoint.write_pass_at_1", COSTS_NO_STEP, **AT_A_SAVE, fault="raises")
def pass_at_1_is_not_in_the_checkpoint(write_pass_at_1):
    return lambda *arguments: None


@planted("lmrl.trainer.take_steps", COSTS_NO_STEP, **IN_A_STEP, fault="too few")
def the_steps_before_a_failure_are_not_saved(take_steps):
    return edited(take_steps, "            save_once(trainer, folder)\n            where", "            where")


@planted("lmrl.trainer.Trainer.draw", COSTS_NO_STEP, **IN_A_STEP, fault="hangs")
@planted("lmrl.trainer.measure", COSTS_NO_STEP, **AT_A_SAVE, fault="hangs")
def the_time_limit_is_not_kept(function):
    limit = "self.config.reward_timeout" if "self.config" in inspect.getsource(function) else "config.reward_timeout"
    return edited(function, limit, "None")


@planted(
    "lmrl.trainer.Trainer.taken_or_not", "test_resume.py::test_a_step_that_failed_can_be_taken_by_the_same_trainer"
)
@planted("lmrl.trainer.Trainer.taken_or_not", COSTS_NO_STEP, **IN_A_STEP, fault="raises")
def the_prompts_of_a_failed_step_are_lost(taken_or_not):
    return lambda self: nullcontext()


@planted("lmrl.trainer.within", "test_preflight.py::test_a_reward_function_that_hangs", reward=hangs_and_swallows, place="thread")  # fmt: skip
def no_time_limit_outside_of_the_main_thread(within):
    return edited(within, "outcome = queue.SimpleQueue()", "return function()")


@planted("lmrl.trainer.alarm", "test_preflight.py::test_a_function_that_swallows_the_alarm_and_answers_late_is_too_slow_all_the_same")  # fmt: skip
def an_alarm_that_can_be_swallowed(alarm):
    return edited(alarm, "    if rung:", "    if False:")


LOCK = "test_checkpoint.py::test_a_lock_names_its_process_and_is_gone_with_it_even_if_its_children_live"


@planted("lmrl.checkpoint.locked", LOCK)
def a_run_without_a_lock(locked):
    return lambda place: nullcontext()


@planted("lmrl.checkpoint.locked", "test_resume.py::test_a_second_process_is_refused_before_it_changes_anything_and_goes_on_after_a_kill")  # fmt: skip
def a_second_process_may_write(locked):
    return lambda place: nullcontext()


@planted("lmrl.trainer.reopen_run", "test_resume.py::test_a_trainer_that_was_restored_before_the_run_went_on_does_not_set_its_checkpoints_aside")  # fmt: skip
def newer_checkpoints_are_set_aside(reopen_run):
    return edited(reopen_run, "if damaged and damage(damaged[-1]) is None:", "if False:")


@planted("lmrl.trainer.reopen_run", "test_resume.py::test_the_published_policy_is_that_of_the_checkpoint_after_a_kill_between_the_two")  # fmt: skip
def the_published_policy_stays_behind(reopen_run):
    return edited(reopen_run, 'publish(checkpoints_of(folder)[-1], folder / "checkpoint")', "pass")


@planted("lmrl.checkpoint.link_weights", "test_checkpoint.py::test_the_weights_are_written_once_and_have_two_names")
def the_weights_are_written_twice(link_weights):
    return shutil.copy2


@planted("lmrl.checkpoint.link_weights", "test_checkpoint.py::test_the_weights_are_written_once_and_have_two_names")
def texts_are_shared_with_the_checkpoint(link_weights):
    return os.link


@planted("lmrl.metrics.tracker_id", "test_metrics.py::test_a_run_that_goes_on_is_the_same_run_for_its_tracker_and_another_is_not", name="wandb")  # fmt: skip
@planted("lmrl.metrics.tracker_id", "test_metrics.py::test_a_run_that_goes_on_is_the_same_run_for_its_tracker_and_another_is_not", name="trackio")  # fmt: skip
def a_resumed_run_is_a_new_one_for_its_tracker(tracker_id):
    return edited(tracker_id, "if not path.exists():", "if True:")


@planted("lmrl.checkpoint.restore", "test_preflight.py::test_a_reference_that_moves_at_the_start_and_at_a_resume")
def a_moved_reference_is_where_it_began(restore):
    return edited(restore, 'trainer.reference.load_state_dict(part("reference"), strict=False)', "pass")


@planted("lmrl.cli.require_compiling", "test_trainer_options.py::test_beside_an_engine_on_a_cpu_nothing_would_be_compiled_and_the_two_are_refused")  # fmt: skip
def torch_compile_beside_an_engine_on_a_cpu_compiles_nothing(require_compiling):
    return lambda config: None


# --- measuring and reporting (section 16) -----------------------------------------------------------------------------


@planted("lmrl.cli.read_settings", "test_eval.py::test_a_runs_settings_are_all_taken_but_the_number_of_answers")
def a_run_is_measured_at_temperature_1(read_settings):
    return then(read_settings, lambda config: replace(config, temperature=1.0))


@planted("lmrl.trainer.Evaluation.pass_at", "test_eval.py::test_pass_at_k_is_the_share_of_choices_with_a_right_answer")
def pass_at_k_from_the_pass_rates(pass_at):
    return edited(pass_at, "pass_at_k(torch.tensor(self.right), n, k)", "1 - (1 - torch.tensor(self.right) / n) ** k")


@planted("lmrl.metrics.mean_metrics", "test_metrics.py::test_over_the_draws_of_a_step_it_is_the_mean")
def only_the_last_draw_is_logged(mean_metrics):
    return lambda records: mean_metrics(records[-1:])


@planted("lmrl.report.setting_rows", "test_report.py::test_settings_that_differ_come_first_and_are_marked")
def a_setting_that_only_one_run_has_is_left_out(setting_rows):
    return lambda runs: [row for row in setting_rows(runs) if all(row[0] in run.settings for run in runs)]
