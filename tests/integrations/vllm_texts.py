"""Print texts of a vLLM engine with the plug-in as JSON: run as a script, because a process can hold one engine.

    python vllm_texts.py FOLDER '{"tensor_parallel_size": 2}' '[{"temperature": 0.0}, {"temperature": 0.9, "seed": 1}]'

The second argument holds options of `LLM`, with further fields of the speculative config under "speculation". The third
holds the sampling parameters of one batch each. The rule of each worker is printed too, and the tokens that each
sampled by itself: of those batches, and of one token for each prompt after the workers were seeded apart.
"""

import json
import sys
from typing import Any

from draftproof.integrations.vllm.startup import rule_of_worker

V = 64
PROMPTS = [[(7 * i + j) % V for j in (0, 1, 2, 3, 0, 1, 2, 5, 0, 1)] for i in range(8)]


def record(worker: Any) -> None:
    """Keep what this worker samples from now on."""
    runner = worker.model_runner
    sample, runner.tokens_of_test = type(runner)._sample, []

    def recorded(*args: Any, **kwargs: Any) -> Any:
        output = sample(runner, *args, **kwargs)
        runner.tokens_of_test.append(output.sampled_token_ids.tolist())
        return output

    runner._sample = recorded


def tokens_of(worker: Any) -> list[Any]:
    return list(worker.model_runner.tokens_of_test)


def seed_apart(worker: Any) -> None:
    import torch

    torch.manual_seed(worker.rank)


def main() -> None:
    from vllm import LLM, SamplingParams

    folder, options, samplings = sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3])
    speculation = {"method": "ngram", "prompt_lookup_max": 3, "prompt_lookup_min": 1, "num_speculative_tokens": 3}
    defaults = {
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 256,
        "skip_tokenizer_init": True,
        "seed": 0,
        "additional_config": {"draftproof": {"rule": "block"}},
    }
    speculation |= options.pop("speculation", {})
    llm = LLM(model=folder, speculative_config=speculation, **{**defaults, **options})
    inputs = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    llm.collective_rpc(record)
    texts = []
    for sampling in samplings:
        asked = SamplingParams(max_tokens=24, detokenize=False, **sampling)
        outputs = llm.generate(inputs, asked, use_tqdm=False)
        texts.append([list(output.outputs[0].token_ids) for output in outputs])
    found = {"texts": texts, "rules": llm.collective_rpc(rule_of_worker), "sampled": llm.collective_rpc(tokens_of)}
    llm.collective_rpc(seed_apart)
    llm.collective_rpc(record)
    llm.generate(inputs, SamplingParams(max_tokens=1, detokenize=False), use_tqdm=False)
    print("RESULT", json.dumps({**found, "seeded_apart": llm.collective_rpc(tokens_of)}))


if __name__ == "__main__":
    main()
