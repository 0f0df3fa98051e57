"""Print texts of a vLLM engine with the plug-in as JSON: run as a script, because a process can hold one engine.

    python vllm_texts.py FOLDER '{"tensor_parallel_size": 2}' '[{"temperature": 0.0}, {"temperature": 0.9, "seed": 1}]'

The second argument holds options of `LLM`, the third the sampling parameters of one batch each. The rule of each worker
is printed too.
"""

import json
import sys

from draftproof.integrations.vllm.startup import rule_of_worker

V = 64
PROMPTS = [[(7 * i + j) % V for j in (0, 1, 2, 3, 0, 1, 2, 5, 0, 1)] for i in range(8)]


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
    llm = LLM(model=folder, speculative_config=speculation, **{**defaults, **options})
    inputs = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    texts = []
    for sampling in samplings:
        asked = SamplingParams(max_tokens=24, detokenize=False, **sampling)
        outputs = llm.generate(inputs, asked, use_tqdm=False)
        texts.append([list(output.outputs[0].token_ids) for output in outputs])
    print("RESULT", json.dumps({"texts": texts, "rules": llm.collective_rpc(rule_of_worker)}))


if __name__ == "__main__":
    main()
