"""`vllm_serving.py BASE [ADAPTER ...]`: vLLM's log-probabilities by position as JSON.

It prints them for the base and each adapter. Torch products replace Triton's kernels.
"""

from __future__ import annotations

import json
import os
import sys
from types import SimpleNamespace
from typing import Any

TOKENS = 256


def _experts_by_torch(
    self: Any,
    output: Any,
    hidden_states: Any,
    w1: Any,
    w2: Any,
    topk_weights: Any,
    topk_ids: Any,
    activation: Any,
    **_: Any,
) -> None:
    """Compute `TritonExperts.apply` with vLLM's stacked factors for each adapter and expert."""
    import torch
    from torch.nn.functional import linear
    from vllm.model_executor.layers.activation import SwigluOAIAndMul  # type: ignore[import-not-found]

    context = self._lora_context

    def layer(of: Any, weight: Any, bias: Any, kind: str, lora: int, expert: int) -> Any:
        plain = linear(of, weight[expert], None if bias is None else bias[expert])
        if lora < 0:
            return plain
        stacks = zip(*(getattr(context, f"{kind}_lora_{letter}_stacked") for letter in "ab"), strict=True)
        return plain + torch.cat([linear(linear(of, a[lora, expert]), b[lora, expert]) for a, b in stacks], dim=-1)

    for token, row in enumerate(hidden_states):
        lora = int(context.punica_wrapper.token_lora_indices[token]) if context else -1
        output[token] = 0
        for weight, expert in zip(topk_weights[token].tolist(), topk_ids[token].tolist(), strict=True):
            inner = layer(row[None], w1, self.w1_bias, "w13", lora, expert)
            active = inner.new_empty(1, self.adjust_N_for_activation(inner.shape[1], activation))
            if activation.value == "swigluoai":  # the CPU build lacks the operator
                active = SwigluOAIAndMul.forward_native(SimpleNamespace(alpha=1.702, limit=7.0), inner)
            else:
                self.activation(activation, active, inner)
            output[token] += weight * layer(active, w2, self.w2_bias, "w2", lora, expert)[0]


def main() -> None:
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
    from vllm import LLM, SamplingParams, TokensPrompt  # type: ignore[import-not-found]
    from vllm.lora.request import LoRARequest  # type: ignore[import-not-found]
    from vllm.model_executor.layers.fused_moe.experts.triton_moe import (  # type: ignore[import-not-found]
        TritonExperts,
    )

    TritonExperts.apply = _experts_by_torch
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
