from dataclasses import fields

import pytest

from lmrl.config import TrainConfig, check_config
from lmrl.mismatch import CORRECTION_MODES
from lmrl.recipes import DEFAULTS, VALUES


def test_defaults_are_valid_and_make_whole_groups():
    config = TrainConfig()
    check_config(config)
    assert config.completions_per_step % config.num_generations == 0


def test_the_recipes_start_from_the_defaults_and_know_the_modes_of_the_correction():
    assert DEFAULTS == {name: getattr(TrainConfig(), name) for name in DEFAULTS}
    assert VALUES["vllm_importance_sampling_mode"] == tuple(CORRECTION_MODES)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_steps": 0}, "max_steps is 0"),
        ({"temperature": 0.0}, "temperature is 0.0"),
        ({"learning_rate": float("nan")}, "learning_rate is nan"),
        ({"num_generations": 1}, "num_generations is 1.*at least 2"),
        (
            {"per_device_train_batch_size": 10, "num_generations": 4},
            "10 completions.*num_generations 4 does not divide",
        ),
        ({"loss_type": "mean"}, "loss_type is 'mean'; choose one of grpo, dapo, bnpo, dr_grpo"),
        ({"scale_rewards": "both"}, "scale_rewards is 'both'; choose one of group, batch, none"),
        ({"lr_scheduler_type": "step"}, "lr_scheduler_type is 'step'"),
        ({"dtype": "int8"}, "dtype is 'int8'"),
        ({"epsilon": 0.0}, "epsilon is 0.0"),
        ({"epsilon_high": -0.1}, "epsilon_high is -0.1"),
        ({"beta": -1.0}, "beta is -1.0"),
        ({"beta": float("inf")}, "beta is inf; it must be finite"),
        ({"temperature": float("inf")}, "temperature is inf; it must be finite"),
        ({"reward_timeout": 1e12}, "reward_timeout is 1000000000000.0; give seconds, more than 0 and at most a day"),
        ({"learning_rate": float("inf")}, "learning_rate is inf.*at most 1"),
        ({"warmup_steps": -5}, "warmup_steps is -5; it must be 0 or more"),
        ({"weight_decay": float("nan")}, "weight_decay is nan"),
        ({"adam_beta2": 1.0}, "adam_beta2 is 1.0; take 0 <= adam_beta2 < 1"),
        ({"save_total_limit": 0}, "save_total_limit is 0; keep at least 1"),
        ({"seed": -1}, "seed is -1"),
        ({"seed": 2**63}, "seed is 9223372036854775808; it must be below"),
        ({"max_prompt_length": 0}, "max_prompt_length is 0; it must be at least 1"),
        ({"report_to": "wandbs"}, "report_to is 'wandbs'; choose from tensorboard, wandb, trackio, or none"),
        ({"name": ""}, "name is ''; give a folder's name without slashes"),
        ({"name": "."}, "name is '.'"),
        ({"name": ".."}, "name is '..'"),
        ({"name": "a/b"}, "name is 'a/b'.*output_dir"),
    ],
)
def test_impossible_settings_say_what_and_how(settings, message):
    with pytest.raises(ValueError, match=message):
        check_config(TrainConfig(**settings))


def test_accumulation_counts_towards_the_groups():
    assert TrainConfig(per_device_train_batch_size=4, gradient_accumulation_steps=2).completions_per_step == 8


def test_every_setting_has_a_help_text():
    import ast
    import inspect

    body = ast.parse(inspect.getsource(TrainConfig)).body[0].body
    documented = {
        node.target.id
        for node, following in zip(body, body[1:], strict=False)
        if isinstance(node, ast.AnnAssign)
        and isinstance(following, ast.Expr)
        and isinstance(following.value, ast.Constant)
    }
    assert documented == {field.name for field in fields(TrainConfig)}
