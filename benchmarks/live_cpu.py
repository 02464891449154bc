"""The live body on one CPU thread beside transformers' continuous batching: same weights, prompts and answers' lengths.

    python benchmarks/live_cpu.py [--model NAME] [--requests N] [--prompt-tokens A-B] [--output-tokens N] [--rounds N]

Both run in this process, by turns, each warmed up by a run that is not counted. Compared is the CPU time of the whole
process, which other load on the machine does not lengthen much; wall-clock seconds are shown beside it. Nobody has a
prefix in common, and the other side's cache is as large as this side's.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from backend.executor import TorchExecutor
from backend.load import load_model
from backend.model import Decoder
from policies.catalogue import build
from policies.config import EngineConfig
from policies.prompt import TokenPrompt
from policies.types import Request

Answers = list[list[int]]
Prompts = list[list[int]]


def main() -> None:
    arguments = parse()
    torch.set_num_threads(1)
    decoder = load_model(arguments.model).decoder
    random = Random(arguments.seed)
    low, high = map(int, arguments.prompt_tokens.split("-"))
    lengths = [random.randint(low, high) for _ in range(arguments.requests)]
    prompts = [[random.randrange(decoder.config.vocab_size) for _ in range(length)] for length in lengths]
    num_tokens = sum(lengths) + arguments.requests * arguments.output_tokens
    sides = {
        "servetwin": ours(decoder, prompts, arguments.output_tokens, num_tokens),
        "transformers": theirs(decoder, prompts, arguments.output_tokens, num_tokens),
    }
    report(arguments, decoder, measure(sides, arguments.rounds), sum(lengths))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--requests", type=int, default=12)
    parser.add_argument("--prompt-tokens", default="16-96", help="drawn evenly between these")
    parser.add_argument("--output-tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the figures here")
    return parser.parse_args()


def ours(decoder: Decoder, prompts: Prompts, num_outputs: int, num_tokens: int) -> Callable[[], Answers]:
    """The whole loop: the core decides, the executor computes. A fresh engine each time, warm buffers."""
    config = EngineConfig(
        num_blocks=num_tokens // 16 + 2 * len(prompts),
        max_num_seqs=max(len(prompts), 1),
        max_model_len=max(map(len, prompts)) + num_outputs,
        enable_prefix_caching=False,
    )
    executor = TorchExecutor(decoder, config)

    def run() -> Answers:
        engine, answers = build(config), {str(index): list[int]() for index in range(len(prompts))}
        for name, prompt in zip(answers, prompts, strict=True):
            request = Request(name, 0.0, TokenPrompt(tuple(prompt)), num_outputs)
            executor.add(request, length=num_outputs)
            engine.add(request, 0.0)
        while (plan := engine.schedule(0.0)) is not None:
            output = executor.execute(plan)
            engine.update(plan, output, 0.0)
            for name, tokens in output.token_ids.items():
                answers[name].extend(tokens)
        for name in answers:
            executor.discard(name)
        return list(answers.values())

    return run


def theirs(decoder: Decoder, prompts: Prompts, num_outputs: int, num_tokens: int) -> Callable[[], Answers]:
    """One manager for all runs; whatever it would infer from free memory is told."""
    import transformers
    from transformers import GenerationConfig
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    model = as_transformers(decoder, transformers)
    page = 16
    batching = ContinuousBatchingConfig(
        page_size=page,
        num_blocks=num_tokens // page + 2 * len(prompts),
        max_batch_tokens=2048,
        max_requests_per_batch=len(prompts),
        allow_block_sharing=False,
    )
    generation = GenerationConfig(  # type: ignore[no-untyped-call]
        max_new_tokens=num_outputs, do_sample=False, eos_token_id=-1, pad_token_id=0
    )

    def run() -> Answers:
        outputs = model.generate_batch(
            prompts, generation, continuous_batching_config=batching, persistent_manager=True, progress_bar=False
        )
        by_prompt = {tuple(output.prompt_ids): output.generated_tokens for output in outputs.values()}
        return [by_prompt[tuple(prompt)] for prompt in prompts]

    return run


def as_transformers(decoder: Decoder, transformers: Any) -> Any:
    """The same weights in their model: fused matrices cut apart, pairs of dimensions brought back to halves."""
    config, weights = decoder.config, decoder.weights
    if config.qk_norm or config.qkv_bias or config.rope.scaling or config.rope.factors:
        raise SystemExit(f"{config.name} is no plain Llama: take another --model")
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=config.vocab_size, hidden_size=config.hidden_size, intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_layers, num_attention_heads=config.num_heads, head_dim=config.head_dim,
            num_key_value_heads=config.num_kv_heads, max_position_embeddings=config.max_model_len,
            rms_norm_eps=config.rms_norm_eps, rope_parameters={"rope_type": "default", "rope_theta": config.rope.theta},
            tie_word_embeddings=config.tied_embeddings, attn_implementation="sdpa",
        )
    )  # fmt: skip
    sizes = [heads * config.head_dim for heads in (config.num_heads, config.num_kv_heads, config.num_kv_heads)]
    told = {"model.embed_tokens.weight": weights.embedding, "model.norm.weight": weights.norm}
    told["lm_head.weight"] = weights.lm_head
    for index, layer in enumerate(weights.layers):
        q, k, v = torch.split(layer.qkv, sizes)
        gate, up = layer.gate_up.chunk(2)
        parts = {
            "self_attn.q_proj": halves(q, config.num_heads) if config.rope.interleaved else q,
            "self_attn.k_proj": halves(k, config.num_kv_heads) if config.rope.interleaved else k,
            "self_attn.v_proj": v, "self_attn.o_proj": layer.output, "mlp.gate_proj": gate, "mlp.up_proj": up,
            "mlp.down_proj": layer.down, "input_layernorm": layer.input_norm,
            "post_attention_layernorm": layer.post_attention_norm,
        }  # fmt: skip
        told |= {f"model.layers.{index}.{name}.weight": value for name, value in parts.items()}
    model.load_state_dict(told)
    return model.eval()


def halves(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    return weight.view(num_heads, -1, 2, weight.shape[1]).transpose(1, 2).flatten(0, 2)


def measure(sides: dict[str, Callable[[], Answers]], rounds: int) -> dict[str, list[tuple[float, float]]]:
    """(CPU, wall) seconds of each round. Ends where the answers differ but for a near tie."""
    answers = {name: run() for name, run in sides.items()}  # warm-up
    same = sum(one == other for one, other in zip(*answers.values(), strict=True))
    print(f"warm: {same} of {len(answers['servetwin'])} answers equal token for token", flush=True)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
    for number in range(rounds):
        for name, run in list(sides.items())[:: 1 if number % 2 else -1]:
            cpu, wall = time.process_time(), time.perf_counter()
            run()
            times[name].append((time.process_time() - cpu, time.perf_counter() - wall))
    return times


def report(
    arguments: argparse.Namespace, decoder: Decoder, times: dict[str, list[tuple[float, float]]], num_prompt: int
) -> None:
    num_output = arguments.requests * arguments.output_tokens
    medians = {name: statistics.median(cpu for cpu, _ in each) for name, each in times.items()}
    print(f"{decoder.config.name}: {arguments.requests} requests, {num_prompt} prompt and {num_output} output tokens")
    for name, each in times.items():
        cpu, wall = (", ".join(f"{pair[i]:.2f}" for pair in each) for i in (0, 1))
        print(f"{name:>12}: {num_output / medians[name]:7.1f} output tok/s of CPU time; CPU s {cpu}; wall s {wall}")
    ratio = medians["transformers"] / medians["servetwin"]
    print(f"transformers / servetwin, medians of CPU time: {ratio:.2f}")
    if arguments.json:
        arguments.json.write_text(json.dumps({"ratio": ratio, "seconds": times, "torch": torch.__version__}, indent=1))


if __name__ == "__main__":
    main()
    os._exit(0)  # their manager's thread would be waited for
