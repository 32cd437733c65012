"""The control requests of trainers around a change of weights, in their order, by trainer.

A step is method, path, body, the status wanted, and fields of the answer that the trainer reads. `CHECKPOINT` stands
for a directory with other weights. A step that a trainer repeats until it is answered 200 has the status None.
Read at the commits that `trainer_requests` names, in `slime/backends/sglang_utils/server_control.py`,
`miles/backends/sglang_utils/sglang_engine.py`, `remote_inference_client.py` of SkyRL, `src/prime_rl/utils/client.py`,
`areal/engine/sglang_remote.py`, `vllm_remote.py`, `http_server_engine.py` of verl, `sglang_generation.py` of NeMo-RL.
"""

from __future__ import annotations

CHECKPOINT = "CHECKPOINT"
_DONE = {"success": True}
_IDLE = {"num_running_reqs": 0, "num_waiting_reqs": 0}

FLOWS = {
    "slime": [
        ("GET", "/health_generate", None, 200, {}),
        ("POST", "/pause_generation", {}, 200, {}),
        ("GET", "/flush_cache", None, None, {}),
        ("POST", "/update_weights_from_disk", {"model_path": CHECKPOINT, "weight_version": "7"}, 200, _DONE),
        ("GET", "/get_weight_version", None, 200, {"weight_version": "7"}),
        ("POST", "/continue_generation", {}, 200, {}),
        ("POST", "/abort_request", {"abort_all": True}, 200, {}),
        ("GET", "/v1/loads?include=core", None, None, _IDLE),
    ],
    "Miles": [
        ("POST", "/pause_generation", {"mode": "retract"}, 200, {}),
        ("POST", "/flush_cache", {}, None, {}),
        ("POST", "/begin_weight_update", {"selector": "all"}, 200, _DONE),
        ("POST", "/update_weights_from_disk", {"model_path": CHECKPOINT}, 200, _DONE),
        ("POST", "/end_weight_update", {}, 200, _DONE),
        ("POST", "/update_weight_version", {"new_version": "7", "abort_all_requests": False}, 200,
         {"success": True, "new_version": "7"}),
        ("GET", "/model_info", None, 200, {"weight_version": "7"}),
        ("POST", "/continue_generation", {}, 200, {}),
        ("POST", "/weights_checker", {"action": "compare", "allow_quant_error": False}, 501, {}),
    ],
    "SkyRL": [
        ("GET", "/get_world_size", None, 200, {}),
        ("POST", "/pause?mode=keep&clear_cache=false", None, 200, {"status": "paused"}),
        ("POST", "/init_weight_transfer_engine", {"init_info": {"master_address": "x"}}, 501, {}),
        ("POST", "/collective_rpc", {"method": "skyrl_start_weight_update"}, 501, {}),
        ("POST", "/update_weights", {"update_info": {"names": ["x"]}}, 501, {}),
        ("POST", "/fetch_weights", {"target_version": 7, "sync_dir": "/x"}, 501, {}),
        ("POST", "/reset_prefix_cache", {"reset_running_requests": True}, 200, _DONE),
        ("POST", "/resume", None, 200, {"status": "resumed"}),
        ("POST", "/tokenize", {"model": "tiny", "prompt": "a", "add_special_tokens": False}, 200, {"tokens": [67]}),
        ("POST", "/detokenize", {"model": "tiny", "tokens": [67]}, 200, {"prompt": "a"}),
        ("POST", "/finish_session?session_id=s", None, 200, {}),
        ("POST", "/sleep?level=1", None, 501, {}),
        ("POST", "/wake_up?tags=weights", None, 501, {}),
    ],
    "prime-rl": [
        ("GET", "/health", None, 200, {}),
        ("GET", "/v1/models", None, 200, {"object": "list"}),
        ("POST", "/pause?mode=keep&clear_cache=false", None, 200, {}),
        ("POST", "/update_weights", {"weight_dir": CHECKPOINT}, 200, {"weight_version": "1"}),
        ("POST", "/resume", None, 200, {}),
        ("GET", "/liveness", None, 200, {}),
        ("POST", "/init_broadcaster", {}, 404, {}),
        ("POST", "/load_lora_adapter", {"lora_name": "x", "lora_path": "/x"}, 404, {}),
    ],
    "AReaL by SGLang": [
        ("GET", "/health", None, 200, {}),
        ("POST", "/pause_generation", {}, 200, {}),
        ("POST", "/update_weights_from_disk", {"model_path": CHECKPOINT, "abort_all_requests": True}, 200, _DONE),
        ("POST", "/continue_generation", {}, 200, {}),
        ("POST", "/init_weights_update_group", {"master_address": "x", "master_port": "5"}, 501, {}),
    ],
    "AReaL by vLLM": [
        ("POST", "/areal_pause_generation", {}, 200, _DONE),
        ("POST", "/areal_update_weights", {"model_path": CHECKPOINT}, 200, _DONE),
        ("POST", "/areal_continue_generation", {}, 200, _DONE),
        ("POST", "/areal_set_update_weight_meta", {"names": [], "dtypes": []}, 501, {}),
        ("POST", "/areal_update_weights_xccl", {}, 501, {}),
        ("POST", "/areal_update_weights_lora_xccl", {"names": ["n"], "lora_name": "a-v3"}, 501, {}),
    ],
    "verl": [
        ("POST", "/abort_request", {"rid": "", "abort_all": True}, 200, {}),
        ("GET", "/flush_cache", None, None, {}),
        ("POST", "/update_weights_from_tensor", {"serialized_named_tensors": ["x"], "flush_cache": False}, 400, {}),
        ("POST", "/release_memory_occupation", {"tags": ["kv_cache"]}, 501, {}),
    ],
    "NeMo-RL": [
        ("GET", "/health_generate", None, 200, {}),
        ("POST", "/abort_request", {"abort_all": True}, 200, {}),
        ("GET", "/flush_cache", None, None, {}),
        ("POST", "/weights_checker", {"action": "snapshot"}, 501, {}),
        ("POST", "/resume_memory_occupation", {"tags": ["weights"]}, 501, {}),
    ],
}  # fmt: skip
