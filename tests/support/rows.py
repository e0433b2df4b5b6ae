"""Rows of tables of training runs, for forecasts."""

from pathlib import Path

DATA = Path(__file__).parents[2] / "benchmarks" / "data" / "planner_public.csv"

LLAMA_8B = {
    "model_name": "Llama-3.1-8B",
    "params_b": "8.03",
    "n_layers": "32",
    "d_model": "4096",
    "n_heads": "32",
    "n_kv_heads": "8",
    "d_ff": "14336",
    "vocab": "128256",
    "seq_len": "8192",
    "gpus": "64",
    "gpu_model": "H100-SXM5-80GB",
    "gpu_mem_gb": "80",
    "interconnect": "NVLink intra; 3200 Gbps/node",
    "nodes": "8",
    "strategy": "FSDP2",
    "precision": "bf16/fp32/bf16",
    "activation_checkpointing": "full",
    "attention_impl": "SDPA (flash)",
    "torch_compile": "no",
    "micro_batch_per_gpu": "1",
    "grad_accum": "1",
    "optimizer": "AdamW",
    "mem_metric": "reserved",
    "master_dtype": "fp32",
}
