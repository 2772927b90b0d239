"""Run by a Python that has vLLM: `vllm_serving.py BASE [ADAPTER ...]` prints log-probabilities by position, as JSON.

They are those of the base, and of each adapter served over it.  One process, without kernels that are compiled.
"""

from __future__ import annotations

import json
import os
import sys

TOKENS = 256


def main() -> None:
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
    from vllm import LLM, SamplingParams, TokensPrompt  # type: ignore[import-not-found]
    from vllm.lora.request import LoRARequest  # type: ignore[import-not-found]

    base, *adapters = sys.argv[1:]
    how = {"skip_tokenizer_init": True, "dtype": "float32", "enforce_eager": True, "max_model_len": 64}
    lora = {"enable_lora": True, "max_lora_rank": 16} if adapters else {}
    model = LLM(model=base, max_logprobs=TOKENS, **how, **lora)
    asked = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=TOKENS)
    prompt = TokensPrompt(prompt_token_ids=list(range(5, 45)))
    found = []
    for number, adapter in enumerate([None, *adapters]):
        request = adapter and LoRARequest(adapter, number, adapter)
        (answer,) = model.generate(prompt, asked, lora_request=request, use_tqdm=False)
        rows = [{token: one.logprob for token, one in row.items()} for row in answer.prompt_logprobs[1:]]
        found.append([[row[token] for token in range(TOKENS)] for row in rows])
    print(json.dumps(found))


if __name__ == "__main__":
    main()
