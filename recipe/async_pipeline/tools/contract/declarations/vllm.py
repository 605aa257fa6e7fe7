# SPDX-License-Identifier: Apache-2.0
"""What this package uses of vLLM's objects at run time, for `tools/contract/engines.py`, which reads it.

Imports are not listed: they are read from the code. Literals only, since the file is read, not imported.
`tools/contract/declared.py` has the grammar.
"""

from __future__ import annotations

from collections.abc import Mapping

FILES: Mapping[str, str] = {
    "lab/gpu_kit/engine_check.py": "verify_gpu.sh",
    "lab/bench/jobs/weight_updates/weight_sync_worker.py": "benchmarks",
    "verl_bridge/replaced.py": "weight load",
    "verl_bridge/rollout/served_layout.py": "proof",
    "verl_bridge/rollout/served_parts.py": "proof",
    "verl_bridge/rollout/vllm/adapter.py": "weight load",
    "verl_bridge/rollout/vllm/block_fp8.py": "fp8",
    "verl_bridge/rollout/vllm/cpu_convolution.py": "layers on a CPU",
    "verl_bridge/rollout/vllm/engine.py": "generation",
    "verl_bridge/rollout/vllm/facts.py": "start of an engine",
    "verl_bridge/rollout/vllm/layout.py": "proof",
    "verl_bridge/rollout/vllm/plugin.py": "weight load",
    "verl_bridge/rollout/vllm/server.py": "weight load",
    "verl_bridge/rollout/vllm/worker.py": "weight load",
    "verl_bridge/rules/engine_memory.py": "share of device memory",
    "verl_bridge/rules/expert_backends.py": "proof of experts",
}
"""The files that use vLLM, and what breaks without something that they import."""

ARGUMENTS: str = "vllm.engine.arg_utils:AsyncEngineArgs"
"""Where they are declared."""

USES: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "weight load": {
        "vllm.v1.engine.core:EngineCore": ("collective_rpc", "scheduler"),
        "vllm.v1.engine.core_client:AsyncMPClient": ("call_utility_async",),
        "vllm.v1.engine.async_llm:AsyncLLM": ("engine_core", "collective_rpc"),
        "vllm.v1.worker.worker_base:WorkerBase": ("device", "model_runner", "parallel_config"),
        "vllm.config.parallel:ParallelConfig": ("node_rank",),
        # By them vLLM finds the plug-in, and the plug-in the process.
        "vllm.plugins": ("'vllm.general_plugins'",),
        "vllm.v1.engine.utils": ("'EngineCore'", "'EngineCore_DP'"),
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner": ("model",),
        "vllm.v1.worker.gpu.model_runner:GPUModelRunner": ("model",),
        "vllm.model_executor.models.llama:LlamaForCausalLM": ("load_weights",),
    },
    "version spans": {
        "vllm.v1.core.sched.scheduler:Scheduler": ("requests",),
        "vllm.v1.request:Request": ("num_output_tokens",),
        "vllm.v1.engine.core:EngineCore": ("batch_queue",),
        "vllm.v1.outputs:ModelRunnerOutput": ("req_ids", "sampled_token_ids"),
        "vllm.v1.engine.async_llm:AsyncLLM": ("add_request",),
    },
    "prefixes of old versions": {
        "vllm.v1.request:Request": (
            "num_computed_tokens",
            "cache_salt",
            "block_hashes",
            "update_block_hashes",
        ),
        "vllm.inputs.llm:TokensPrompt": ("prompt_token_ids", "cache_salt"),
    },
    "order of requests": {
        "vllm.engine.arg_utils:EngineArgs": ("scheduling_policy",),
        "vllm.config.scheduler": ("'priority'",),
        "vllm.v1.request:Request": ("priority",),
    },
    "generation": {
        "vllm.v1.engine.async_llm:AsyncLLM": ("generate",),
        "vllm.outputs:RequestOutput": ("outputs", "finished", "prompt_token_ids"),
        "vllm.outputs:CompletionOutput": (
            "token_ids",
            "finish_reason",
            "logprobs",
            "cumulative_logprob",
            "text",
        ),
        "vllm.logprobs:Logprob": ("logprob",),
        "vllm.sampling_params:SamplingParams": (
            "max_tokens",
            "min_tokens",
            "seed",
            "stop",
            "detokenize",
            "output_kind",
            "structured_outputs",
        ),
        "vllm.sampling_params:StructuredOutputsParams": ("json",),
        "vllm.sampling_params:RequestOutputKind": ("FINAL_ONLY",),
    },
    "pause": {
        "vllm.v1.engine.async_llm:AsyncLLM": ("pause_generation", "resume_generation"),
        # With it, the modes abort and wait reject requests with this error instead of holding them back.
        "vllm.v1.engine.core_client:AsyncMPClient": (
            "!pause_generation_async | vllm.exceptions:RetryableRequestError",
        ),
        "vllm.v1.engine": ("'abort'", "'wait'", "'keep'"),
    },
    "responses of lost replicas": {
        "vllm.v1.engine.async_llm:AsyncLLM": ("output_processor",),
        "vllm.v1.engine.output_processor:OutputProcessor": ("request_states",),
        "vllm.v1.engine.output_processor:RequestState": ("detokenizer", "logprobs_processor"),
        "vllm.v1.engine.detokenizer:BaseIncrementalDetokenizer": ("output_token_ids",),
        "vllm.v1.engine.logprobs:LogprobsProcessor": ("logprobs",),
    },
    "supervision": {
        "vllm.v1.engine.async_llm:AsyncLLM": ("errored", "dead_error"),
        "vllm.v1.engine.core:EngineCore": ("is_scheduler_paused",),
    },
    "proof": {
        "vllm.model_executor.models.llama:LlamaForCausalLM": ("packed_modules_mapping",),
        "vllm.model_executor.models.llama": ("'qkv_proj'", "'gate_up_proj'"),
        "vllm.model_executor.models.qwen2_5_vl:Qwen2_5_VLForConditionalGeneration": ("hf_to_vllm_mapper",),
        "vllm.model_executor.models.utils:WeightsMapper": ("_map_name_with_shard | map_name | _map_name",),
        "vllm.model_executor.layers.linear": ("'output_dim'", "'input_dim'"),
        "vllm.model_executor.layers.linear:ColumnParallelLinear": ("tp_rank", "tp_size", "output_size"),
        "vllm.model_executor.layers.linear:MergedColumnParallelLinear": ("output_sizes",),
        "vllm.model_executor.layers.linear:RowParallelLinear": ("tp_rank",),
        "vllm.model_executor.layers.linear:QKVParallelLinear": (
            "num_heads",
            "num_kv_heads",
            "num_kv_head_replicas",
            "total_num_heads",
            "total_num_kv_heads",
            "head_size",
            "v_head_size",
        ),
        "vllm.model_executor.layers.vocab_parallel_embedding:VocabParallelEmbedding": ("shard_indices",),
        "vllm.model_executor.layers.vocab_parallel_embedding:VocabParallelEmbeddingShardIndices": (
            "org_vocab_start_index",
            "org_vocab_end_index",
        ),
        "vllm.model_executor.layers.attention.attention": (
            "'_q_scale'",
            "'_k_scale'",
            "'_v_scale'",
            "'_prob_scale'",
        ),
    },
    "proof of latent attention": {
        "vllm.model_executor.layers.attention.mla_attention:MLAAttention": ("kv_b_proj",),
        "vllm.model_executor.layers.attention.mla_attention": ("'W_UK_T'", "'W_UV'"),
        "vllm.model_executor.layers.linear": ("'weight'",),
        "vllm.model_executor.models.deepseek_v2": ("'fused_qkv_a_proj'",),
    },
    "proof of linear attention": {
        "vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn": ("QwenGatedDeltaNetAttention",),
        "vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn:QwenGatedDeltaNetAttention": (
            "conv1d",
            "key_dim",
            "value_dim",
            "A_log",
            "dt_bias",
        ),
        "vllm.model_executor.layers.mamba.mamba_mixer2": ("MambaMixer2", "Mixer2RMSNormGated"),
        "vllm.model_executor.layers.mamba.mamba_mixer2:MambaMixer2": (
            "conv1d",
            "in_proj",
            "intermediate_size",
            "num_heads",
            "ssm_state_size",
            "A",
            "D",
            "dt_bias",
        ),
        "vllm.model_executor.layers.mamba.mamba_mixer2:Mixer2RMSNormGated": ("tp_rank", "tp_size", "weight"),
    },
    "proof of reordered weights": {
        "vllm.model_executor.models.llama4": ("Llama4Attention", "Llama4MoE"),
        "vllm.model_executor.models.llama4:Llama4Attention": ("head_dim", "qkv_proj"),
        "vllm.model_executor.models.llama4:Llama4MoE": ("experts",),
        # A model that 0.32 lacks.
        "vllm.model_executor.models.gpt_neox": (
            "GPTNeoXAttention | !vllm.model_executor.models.gpt_neox:GPTNeoXForCausalLM",
        ),
        "vllm.model_executor.models.gpt_neox:GPTNeoXAttention": (
            "total_num_heads | !vllm.model_executor.models.gpt_neox:GPTNeoXForCausalLM",
            "head_size | !vllm.model_executor.models.gpt_neox:GPTNeoXForCausalLM",
            "query_key_value | !vllm.model_executor.models.gpt_neox:GPTNeoXForCausalLM",
        ),
        "vllm.model_executor.models.granitemoe": ("GraniteMoeMoE",),
        "vllm.model_executor.models.granitemoe:GraniteMoeMoE": ("experts",),
    },
    "proof of experts": {
        "vllm.config.kernel": ("'triton'",),
        "vllm.model_executor.layers.fused_moe.runner.moe_runner:MoERunner": ("routed_experts",),
        "vllm.model_executor.layers.fused_moe.routed_experts": ("'is_transposed'",),
        "vllm.model_executor.layers.fused_moe.routed_experts:RoutedExperts": (
            "get_expert_mapping | make_expert_params_mapping",
            "_map_global_expert_id_to_local_expert_id",
            "moe_config",
        ),
        "vllm.model_executor.layers.fused_moe.config:FusedMoEConfig": (
            "moe_parallel_config",
            "num_experts",
            "num_logical_experts",
        ),
        "vllm.model_executor.layers.fused_moe.config:FusedMoEParallelConfig": ("tp_rank", "tp_size"),
    },
    "fp8": {
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner": ("vllm_config",),
        "vllm.v1.worker.gpu.model_runner:GPUModelRunner": ("vllm_config",),
        "vllm.config.vllm:VllmConfig": ("quant_config", "model_config"),
        "vllm.config.model:ModelConfig": ("dtype",),
        "vllm.model_executor.layers.quantization.fp8:Fp8Config": ("weight_block_size",),
        "vllm.model_executor.layers.quantization.fp8": ("'weight_scale_inv'",),
    },
    "LoRA": {
        "vllm.v1.worker.gpu_worker:Worker": ("add_lora", "remove_lora"),
        "vllm.v1.worker.lora_model_runner_mixin:LoRAModelRunnerMixin": ("lora_manager",),
        "vllm.lora.worker_manager:LRUCacheWorkerLoRAManager": ("_adapter_manager",),
        "vllm.lora.model_manager:LRUCacheLoRAModelManager": (
            "lora_index_to_id",
            "modules",
            "packed_modules_mapping",
            "lora_config",
        ),
        "vllm.lora.layers.base_linear:BaseLinearLayerWithLoRA": (
            "base_layer",
            "lora_a_stacked",
            "lora_b_stacked",
        ),
        "vllm.lora.peft_helper:PEFTHelper": ("vllm_lora_scaling_factor",),
        # verl asks for one of them where mappers also stack tensors, which 0.24 does not.
        "vllm.model_executor.models.utils:WeightsMapper": (
            "get_unstacked_mapper | get_rename_mapper | !orig_to_new_stacked",
        ),
        "vllm.config.lora:LoRAConfig": ("lora_dtype",),
    },
    "benchmarks": {
        "vllm.v1.worker.gpu_worker:Worker": ("execute_model",),
        "vllm.v1.worker.worker_base:WorkerBase": ("rank",),
    },
    "verify_gpu.sh": {
        "vllm.v1.engine.async_llm:AsyncLLM": ("shutdown",),
    },
    "start of an engine": {
        "vllm.v1.worker.worker_base:WorkerBase": ("vllm_config",),
        "vllm.v1.worker.gpu.model_runner:GPUModelRunner": ("req_states",),
        "vllm.model_executor.layers.attention.attention:Attention": ("attn_backend",),
        "vllm.v1.attention.backend:AttentionBackend": ("get_name",),
        "vllm.config.vllm:VllmConfig": ("parallel_config",),
        "vllm.config.parallel:ParallelConfig": ("distributed_executor_backend",),
        "vllm.config.parallel": ("'uni'",),
        "vllm.config.model:ModelConfig": ("enforce_eager",),
        # Models scale pixels themselves since 0.28, unless this is False.
        "vllm.engine.arg_utils:EngineArgs": (
            "mm_device_do_normalize | !vllm.model_executor.models.vision:FusedInputNorm",
        ),
    },
    "replicas on several nodes": {
        "vllm.envs": ("'VLLM_HOST_IP'",),
    },
    "platform": {
        "vllm.platforms.interface:Platform": ("is_cpu",),
    },
    "experts on a CPU": {
        "vllm.model_executor.layers.fused_moe.routed_experts:RoutedExperts": ("quant_method",),
        "vllm.model_executor.layers.fused_moe.fused_moe_method_base:FusedMoEMethodBase": ("moe_kernel",),
        "vllm.model_executor.layers.fused_moe.modular_kernel:FusedMoEKernel": ("fused_experts",),
        "vllm.model_executor.layers.fused_moe.modular_kernel:FusedMoEExperts": ("moe_config",),
        "vllm.model_executor.layers.fused_moe.experts.cpu_moe:CPUUnquantizedExperts": (
            "_use_zentorch",
            "_padded_intermediate_size",
            "_intermediate_alignment",
            "isa",
        ),
        "vllm.model_executor.layers.fused_moe.config:FusedMoEConfig": ("intermediate_size_per_partition",),
        "vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method": ("'w13_weight'", "'w2_weight'"),
        "vllm._custom_ops": ("cpu_prepack_moe_weight",),
    },
    "start of an engine on a CPU": {
        "vllm.v1.engine.utils": ("get_mp_context",),
    },
    "layers on a CPU": {
        "vllm._custom_ops": ("_supports_onednn", "causal_conv1d_fwd_cpu", "causal_conv1d_update_cpu"),
        "vllm.model_executor.layers.utils": ("check_cpu_sgl_kernel", "dispatch_cpu_unquantized_gemm"),
    },
}
"""By what breaks without it."""
