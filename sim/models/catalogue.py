"""Models by name: shapes from their published config.json; `max_model_len` is its max_position_embeddings."""

from __future__ import annotations

from sim.models.shape import Experts, Model

# fmt: off
MODELS = (
    Model("llama-2-7b", num_layers=32, hidden_size=4096, num_heads=32, num_kv_heads=32, head_dim=128,
          intermediate_size=11008, vocab_size=32000, max_model_len=4096,
          aliases=("meta-llama/Llama-2-7b-hf", "meta-llama/Llama-2-7b-chat-hf", "llama2-7b")),
    Model("llama-3-8b", num_layers=32, hidden_size=4096, num_heads=32, num_kv_heads=8, head_dim=128,
          intermediate_size=14336, vocab_size=128256, max_model_len=8192,
          aliases=("meta-llama/Meta-Llama-3-8B", "meta-llama/Meta-Llama-3-8B-Instruct", "llama3-8b")),
    Model("llama-3-70b", num_layers=80, hidden_size=8192, num_heads=64, num_kv_heads=8, head_dim=128,
          intermediate_size=28672, vocab_size=128256, max_model_len=8192,
          aliases=("meta-llama/Meta-Llama-3-70B", "meta-llama/Meta-Llama-3-70B-Instruct", "llama3-70b")),
    Model("llama-3.1-8b", num_layers=32, hidden_size=4096, num_heads=32, num_kv_heads=8, head_dim=128,
          intermediate_size=14336, vocab_size=128256, max_model_len=131072,
          aliases=("meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.1-8B-Instruct", "llama3.1-8b")),
    Model("llama-3.1-70b", num_layers=80, hidden_size=8192, num_heads=64, num_kv_heads=8, head_dim=128,
          intermediate_size=28672, vocab_size=128256, max_model_len=131072,
          aliases=("meta-llama/Llama-3.1-70B", "meta-llama/Llama-3.1-70B-Instruct",
                   "meta-llama/Llama-3.3-70B-Instruct", "llama3.1-70b")),
    Model("mistral-7b", num_layers=32, hidden_size=4096, num_heads=32, num_kv_heads=8, head_dim=128,
          intermediate_size=14336, vocab_size=32000, max_model_len=32768, sliding_window=4096, num_sliding_layers=32,
          aliases=("mistralai/Mistral-7B-v0.1", "mistralai/Mistral-7B-Instruct-v0.1")),
    Model("qwen3-8b", num_layers=36, hidden_size=4096, num_heads=32, num_kv_heads=8, head_dim=128,
          intermediate_size=12288, vocab_size=151936, max_model_len=40960, qk_norm=True,
          aliases=("Qwen/Qwen3-8B",)),
    Model("qwen3-32b", num_layers=64, hidden_size=5120, num_heads=64, num_kv_heads=8, head_dim=128,
          intermediate_size=25600, vocab_size=151936, max_model_len=40960, qk_norm=True,
          aliases=("Qwen/Qwen3-32B",)),
    Model("qwen3-30b-a3b", num_layers=48, hidden_size=2048, num_heads=32, num_kv_heads=4, head_dim=128,
          intermediate_size=6144, vocab_size=151936, max_model_len=40960, qk_norm=True,
          experts=Experts(num_experts=128, num_experts_per_token=8, intermediate_size=768),
          aliases=("Qwen/Qwen3-30B-A3B",)),
    Model("smollm2-135m", num_layers=30, hidden_size=576, num_heads=9, num_kv_heads=3, head_dim=64,
          intermediate_size=1536, vocab_size=49152, max_model_len=8192, tied_embeddings=True,
          aliases=("HuggingFaceTB/SmolLM2-135M", "HuggingFaceTB/SmolLM2-135M-Instruct")),
    # Of no published model: what the live body fills with random weights, to be run on a CPU.
    Model("tiny", num_layers=2, hidden_size=64, num_heads=4, num_kv_heads=2, head_dim=16,
          intermediate_size=128, vocab_size=512, max_model_len=4096),
    Model("small", num_layers=4, hidden_size=256, num_heads=4, num_kv_heads=2, head_dim=64,
          intermediate_size=704, vocab_size=4096, max_model_len=4096),
)
# fmt: on

BY_NAME = {each.name: each for each in MODELS}
BY_ALIAS = {alias: each for each in MODELS for alias in each.aliases}
