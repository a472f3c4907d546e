"""The tiny policy in the real vLLM engine: its shape is one that vLLM takes, and the two agree on log-probs."""

import os

import pytest
import torch

from lmrl.models import load_policy, load_tokenizer
from lmrl.policy import pad_left, pad_right, token_logprobs, warm_start_folder

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def engine():
    """A vLLM engine on the warm start, in this process; the settings must be in place before the import."""
    settings = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "OMP_NUM_THREADS": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "HF_HUB_OFFLINE": "1",
    }
    os.environ.update(settings)
    from vllm import LLM

    return LLM(
        model=str(warm_start_folder(0)),
        dtype="float32",
        enforce_eager=True,
        skip_tokenizer_init=True,
        logprobs_mode="processed_logprobs",
        max_model_len=32,
        gpu_memory_utilization=0.3,
    )


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_vllm_samples_what_the_trainer_scores(engine, temperature):
    from vllm import SamplingParams

    tokenizer, model = load_tokenizer(warm_start_folder(0)), load_policy(warm_start_folder(0))
    prompts = [tokenizer(text).input_ids for text in ("12+34=", "57+68=", "99+10=")]
    parameters = SamplingParams(
        n=8,
        temperature=temperature,
        max_tokens=4,
        logprobs=0,
        detokenize=False,
        stop_token_ids=[tokenizer.eos_token_id],
    )
    outputs = engine.generate([{"prompt_token_ids": prompt} for prompt in prompts], parameters, use_tqdm=False)
    completions = [(i, c) for i, output in enumerate(outputs) for c in output.outputs]
    ids, mask = pad_right([list(c.token_ids) for _, c in completions], tokenizer.pad_token_id)
    engine_logprobs, _ = pad_right([[0] * len(c.token_ids) for _, c in completions], 0)
    engine_logprobs = engine_logprobs.float()
    for row, (_, completion) in enumerate(completions):
        for t, (token, choices) in enumerate(zip(completion.token_ids, completion.logprobs, strict=True)):
            engine_logprobs[row, t] = choices[token].logprob
    prompt_ids, prompt_mask = pad_left([prompts[i] for i, _ in completions], tokenizer.pad_token_id)
    with torch.no_grad():
        scored = token_logprobs(model, prompt_ids, prompt_mask, ids, temperature)
    assert (scored - engine_logprobs)[mask].abs().max() < 1e-4
    assert len({tuple(c.token_ids) for _, c in completions}) > 3
    finished = [c for _, c in completions if c.finish_reason == "stop"]
    assert finished and all(c.token_ids[-1] == tokenizer.eos_token_id for c in finished)
