# SPDX-License-Identifier: Apache-2.0
"""What this package uses of SGLang's objects at run time, for `tools/contract/engines.py`, which reads it.

Imports are not listed: they are read from the code. Literals only, since the file is read, not imported.
`tools/contract/declared.py` has the grammar.
"""

from __future__ import annotations

from collections.abc import Mapping

FILES: Mapping[str, str] = {
    "lab/gpu_kit/engine_check.py": "verify_gpu.sh",
    "lab/bench/jobs/weight_updates/sglang_steps.py": "benchmarks",
    "verl_bridge/replaced.py": "start of an engine",
    "verl_bridge/rollout/served_layout.py": "proof",
    "verl_bridge/rollout/served_parts.py": "proof",
    "verl_bridge/rollout/sglang/adapter.py": "weight load",
    "verl_bridge/rollout/sglang/arguments.py": "start of an engine on a CPU",
    "verl_bridge/rollout/sglang/calls.py": "weight load",
    "verl_bridge/rollout/sglang/cpu_stubs.py": "start of an engine on a CPU",
    "verl_bridge/rollout/sglang/engine.py": "generation",
    "verl_bridge/rollout/sglang/layout.py": "proof",
    "verl_bridge/rollout/sglang/lora.py": "LoRA",
    "verl_bridge/rollout/sglang/pictures.py": "pictures of requests",
    "verl_bridge/rollout/sglang/rank.py": "weight load",
    "verl_bridge/rollout/sglang/scheduler.py": "start of an engine",
    "verl_bridge/rollout/sglang/server.py": "start of an engine",
    "verl_bridge/rules/engine_memory.py": "share of device memory",
    "verl_bridge/rules/expert_backends.py": "proof of experts",
    "verl_bridge/rules/sglang_rules.py": "refusal of arguments",
}
"""The files that use SGLang, and what breaks without something that they import."""

ARGUMENTS: str = "sglang.srt.server_args:ServerArgs | sglang.srt.arg_groups.field_order:'*'"
"""Where they are declared."""

USES: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "weight load": {
        "sglang.srt.managers.scheduler:Scheduler": (
            "tp_cpu_group",
            "tp_worker",
            "server_args",
            "init_request_dispatcher",
            "_request_dispatcher",
        ),
        "sglang.srt.server_args:ServerArgs | sglang.srt.arg_groups.field_order:'*'": ("node_rank",),
        "sglang.srt.managers.tp_worker:TpModelWorker": ("model_runner",),
        "sglang.srt.model_executor.model_runner:ModelRunner": ("device", "model"),
        "sglang.srt.managers.tokenizer_manager:TokenizerManager": (
            "send_to_scheduler | _dispatch_to_scheduler",
            "_result_dispatcher",
            "auto_create_handle_loop",
        ),
        "sglang.srt.managers.tokenizer_manager": ("'.send_pyobj' | '._dispatch_to_scheduler'",),
        "sglang.srt.models.llama:LlamaForCausalLM": ("load_weights",),
    },
    "version spans": {
        "sglang.srt.managers.scheduler:Scheduler": (
            "waiting_queue",
            "running_batch",
            "last_batch",
            "chunked_req",
            "grammar_manager",
            "result_queue",
        ),
        "sglang.srt.constrained.grammar_manager:GrammarManager": ("grammar_queue",),
        "sglang.srt.managers.schedule_batch:ScheduleBatch": ("reqs", "forward_mode"),
        "sglang.srt.model_executor.forward_batch_info:ForwardMode": ("is_extend",),
        "sglang.srt.managers.schedule_batch:Req": (
            "rid",
            "output_ids",
            "output_token_logprobs_val | "
            "sglang.srt.managers.schedule_batch:ReqLogprob.output_token_logprobs_val",
            "output_token_logprobs_val | logprob",
            "is_chunked | inflight_middle_chunks",
            "finished",
        ),
        "sglang.srt.managers.tokenizer_manager:TokenizerManager": (
            "_send_one_request | async _send_one_request",
        ),
        "sglang.srt.managers.io_struct:TokenizedGenerateReqInput": ("rid",),
    },
    "prefixes of old versions": {
        "sglang.srt.managers.schedule_batch:Req": ("extra_key", "lora_id"),
        "sglang.srt.managers.io_struct:GenerateReqInput": ("extra_key",),
    },
    "order of requests": {
        "sglang.srt.server_args:ServerArgs | sglang.srt.arg_groups.field_order:'*'": (
            "enable_priority_scheduling",
            "schedule_low_priority_values_first",
            "default_priority_value",
            "disable_priority_preemption",
        ),
        "sglang.srt.managers.io_struct:GenerateReqInput": ("priority",),
    },
    "generation": {
        "sglang.srt.managers.tokenizer_manager:TokenizerManager": ("generate_request", "abort_request"),
        "sglang.srt.managers.io_struct:GenerateReqInput": ("rid", "input_ids", "sampling_params", "stream"),
        "sglang.srt.sampling.sampling_params:SamplingParams": (
            "max_new_tokens",
            "min_new_tokens",
            "sampling_seed",
            "ignore_eos",
        ),
        "sglang.srt.managers.tokenizer_manager": (
            "'output_ids'",
            "'meta_info'",
            "'finish_reason'",
            "'output_token_logprobs'",
            "'completion_tokens'",
        ),
        "sglang.srt.managers.schedule_batch": ("'type'", "'abort'"),
        "sglang.srt.managers.scheduler:Scheduler": ("max_req_len", "max_req_input_len"),
    },
    "pictures of requests": {
        "sglang.srt.managers.tokenizer_manager:TokenizerManager": ("mm_processor",),
        "sglang.srt.multimodal.processors.base_processor:BaseMultimodalProcessor": (
            "load_mm_data | async load_mm_data",
            "process_and_combine_mm_data",
            "async process_mm_data_async",
            "get_mm_items_offset",
        ),
        "sglang.srt.multimodal.processors.qwen_vl:QwenVLImageProcessor": ("mm_tokens",),
        "sglang.srt.multimodal.processors.base_processor:MultimodalSpecialTokens": (
            "image_token",
            "image_token_id",
            "video_token_id",
            "audio_token_id",
            "get_token_id_by_modality",
        ),
        "sglang.srt.managers.io_struct:GenerateReqInput": ("video_data", "audio_data"),
        "sglang.srt.managers.schedule_batch:MultimodalDataItem": ("modality", "offsets"),
        "sglang.srt.managers.schedule_batch:MultimodalProcessorOutput": ("input_ids",),
        "sglang.srt.sampling.sampling_params:SamplingParams": ("logit_bias",),
    },
    "answers with a form": {
        "sglang.srt.managers.scheduler:Scheduler": ("grammar_manager", "model_config", "server_args"),
        "sglang.srt.server_args:ServerArgs | sglang.srt.arg_groups.field_order:'*'": (
            "skip_tokenizer_init",
            "tokenizer_path",
            "model_path",
            "trust_remote_code",
        ),
        "sglang.srt.configs.model_config:ModelConfig": ("vocab_size", "hf_eos_token_id"),
        "sglang.srt.constrained.grammar_manager:GrammarManager": ("grammar_backend",),
        "sglang.srt.constrained.base_grammar_backend": ("create_grammar_backend",),
        "sglang.srt.utils.hf_transformers_utils": ("get_tokenizer",),
        "sglang.srt.sampling.sampling_params:SamplingParams": ("json_schema", "structural_tag"),
    },
    "pause": {
        "sglang.srt.managers.scheduler:Scheduler": ("_engine_paused",),
    },
    "proof": {
        "sglang.srt.models.llama:LlamaForCausalLM": ("bitsandbytes_stacked_params_mapping",),
        "sglang.srt.models.llama": ("'qkv_proj'", "'gate_up_proj'", "'o_proj'", "'down_proj'"),
        "sglang.srt.models.qwen3_moe:Qwen3MoeForCausalLM": ("packed_modules_mapping",),
        "sglang.srt.layers.linear": ("'output_dim'", "'input_dim'"),
        "sglang.srt.layers.linear:ColumnParallelLinear": (
            "tp_rank | tp_group",
            "tp_size | tp_group",
            "output_size",
        ),
        "sglang.srt.distributed.parallel_state:GroupCoordinator": ("rank_in_group", "world_size"),
        "sglang.srt.layers.linear:MergedColumnParallelLinear": ("output_sizes",),
        "sglang.srt.layers.linear:RowParallelLinear": ("tp_rank | tp_group",),
        "sglang.srt.layers.linear:QKVParallelLinear": (
            "num_heads",
            "num_kv_heads",
            "num_kv_head_replicas",
            "total_num_heads",
            "total_num_kv_heads",
            "head_size",
            "v_head_size",
        ),
        "sglang.srt.layers.vocab_parallel_embedding:VocabParallelEmbedding": ("shard_indices",),
        "sglang.srt.layers.vocab_parallel_embedding:VocabParallelEmbeddingShardIndices": (
            "org_vocab_start_index",
            "org_vocab_end_index",
        ),
    },
    "proof of latent attention": {
        "sglang.srt.models.deepseek_v2": ("'kv_b_proj'", "'w_kc'", "'w_vc'", "'fused_qkv_a_proj_with_mqa'"),
        "sglang.srt.layers.linear": ("'weight'",),
    },
    "proof of experts": {
        "sglang.srt.server_args:'*' | sglang.srt.arg_groups.choices:'*'": ("triton",),
        "sglang.srt.models.deepseek_v2": ("'experts'", "'shared_experts'"),
        "sglang.srt.layers.moe.fused_moe_triton.layer:FusedMoE": (
            "make_expert_params_mapping",
            "make_expert_params_mapping_fused",
            "_map_global_expert_id_to_local_expert_id",
            "num_experts",
            "num_fused_shared_experts",
            "_num_global_routed",
            "moe_tp_rank",
            "moe_tp_size",
            "quant_method",
            "use_triton_kernels",
        ),
        "sglang.srt.layers.quantization.unquant:UnquantizedFusedMoEMethod": ("load_up_proj_weight_first",),
    },
    "LoRA": {
        "sglang.srt.managers.scheduler:Scheduler": ("enable_lora",),
        "sglang.srt.managers.tokenizer_manager:TokenizerManager": ("lora_registry",),
        "sglang.srt.lora.lora_registry:LoRARegistry": ("register",),
        "sglang.srt.lora.lora_registry:LoRARef": ("lora_id",),
        "sglang.srt.model_executor.model_runner:ModelRunner": ("lora_manager",),
        "sglang.srt.lora.lora_manager:LoRAManager": (
            "lora_modules",
            "loras",
            "memory_pool",
            "embed_tokens_module",
            "lm_head_module",
            "unload_lora_adapter",
            "load_lora_adapter_from_tensors",
            "fetch_new_loras",
        ),
        "sglang.srt.managers.io_struct:LoRAUpdateOutput": ("success", "error_message"),
        "sglang.srt.lora.mem_pool:LoRAMemoryPool": ("uid_to_buffer_id", "load_lora_weight_to_buffer"),
        "sglang.srt.lora.layers:BaseLayerWithLoRA": ("base_layer",),
        "sglang.srt.lora.layers:QKVParallelLinearWithLoRA": ("A_buffer_qkv", "B_buffer_qkv"),
        "sglang.srt.lora.layers:RowParallelLinearWithLoRA": ("A_buffer", "B_buffer"),
        "sglang.srt.server_args:ServerArgs | sglang.srt.arg_groups.field_order:'*'": ("max_loras_per_batch",),
    },
    "refusal of arguments": {
        "sglang.srt.server_args:ServerArgs | sglang.srt.arg_groups.field_order:'*'": (
            "model_path",
            "dtype",
            "quantization",
            "lora_paths",
            "load_format",
            "enable_lora",
            "max_lora_rank",
            "lora_target_modules",
            "custom_weight_loader",
            "tp_size",
            "pp_size",
            "dp_size",
            "enable_dp_attention",
            "ep_size",
            "speculative_algorithm",
            "disaggregation_mode",
            "host",
            "api_key",
            "admin_api_key",
            "tokenizer_worker_num",
            "nnodes",
            "node_rank",
            "dist_init_addr",
        ),
    },
    "benchmarks": {
        "sglang.srt.managers.scheduler:Scheduler": ("run_batch", "tp_cpu_group"),
    },
    "verify_gpu.sh": {
        "sglang.srt.entrypoints.engine:Engine": ("generate", "server_args", "tokenizer_manager", "shutdown"),
    },
    # verl lists the fields of the class, which 0.5.23 keeps elsewhere.
    "start of a server by verl 0.9.1": {
        "sglang.srt.server_args:ServerArgs": ("model_path",),
    },
    "replicas on several nodes": {
        "sglang.srt.utils.network": ("'SGLANG_HOST_IP'",),
    },
    "start of an engine on a CPU": {
        "sglang.srt.utils.common": ("'SGLANG_USE_CPU_ENGINE'", "'SGLANG_CPU_OMP_THREADS_BIND'"),
        "sglang.srt.layers.attention.attention_registry": ("'torch_native'",),
        "sglang.srt.utils.patch_torch": ("'_reduce_tensor_original'", "'_rebuild_cuda_tensor_original'"),
        "sglang.srt.layers.logits_processor": ("torch",),
        "sglang.srt.lora.layers": ("torch",),
        "sglang.srt.lora.backend.torch_backend": ("torch",),
        "sglang.srt.server_args:ServerArgs | sglang.srt.arg_groups.field_order:'*'": (
            "device",
            "attention_backend",
            "lora_backend",
            "enable_memory_saver",
            "disable_overlap_schedule",
            "sleep_on_idle",
            "max_total_tokens",
        ),
    },
}
"""By what breaks without it."""
