"""Keys of a Serve config, by section. Ray Serve's schemas have the same, and take seconds to import."""

from __future__ import annotations

TOP = (
    "proxy_location",
    "http_options",
    "grpc_options",
    "controller_options",
    "logging_config",
    "tracing_config",
    "applications",
    "target_capacity",
)
HTTP_OPTIONS = (
    "host",
    "port",
    "root_path",
    "request_timeout_s",
    "keep_alive_timeout_s",
    "ssl_keyfile",
    "ssl_certfile",
    "ssl_keyfile_password",
    "ssl_ca_certs",
)
GRPC_OPTIONS = ("port", "grpc_servicer_functions", "request_timeout_s", "enable_reflection")
APPLICATION = (
    "name",
    "route_prefix",
    "import_path",
    "runtime_env",
    "host",
    "port",
    "deployments",
    "autoscaling_policy",
    "args",
    "logging_config",
    "external_scaler_enabled",
)
DEPLOYMENT = (
    "name",
    "num_replicas",
    "max_ongoing_requests",
    "max_queued_requests",
    "backpressure_config",
    "user_config",
    "autoscaling_config",
    "graceful_shutdown_wait_loop_s",
    "graceful_shutdown_timeout_s",
    "health_check_period_s",
    "health_check_timeout_s",
    "ray_actor_options",
    "placement_group_bundles",
    "placement_group_strategy",
    "placement_group_bundle_label_selector",
    "max_replicas_per_node",
    "logging_config",
    "request_router_config",
    "gang_scheduling_config",
    "deployment_actors",
    "rolling_update_percentage",
    "max_surge_percent",
)
