"""The launcher: what programs read of it is there; torchrun starts processes."""

from __future__ import annotations

from zoo.deepspeed.modules import Name, Names, Refused, Table

_LAUNCHER = "zoo.deepspeed.adapters.launcher"
_WHY = "there is no launcher yet: torchrun starts the processes on every machine."

_CONSTANTS: Names = {
    name: f"{_LAUNCHER}:{name}"
    for name in (
        "IMPI_LAUNCHER", "MPICH_LAUNCHER", "MVAPICH_LAUNCHER", "OPENMPI_LAUNCHER", "PDSH_LAUNCHER",
        "PDSH_MAX_FAN_OUT", "SLURM_LAUNCHER",
    )
}  # fmt: skip
_RUNNERS: Names = {
    name: Refused(_WHY)
    for name in ("IMPIRunner", "MPICHRunner", "MVAPICHRunner", "OpenMPIRunner", "PDSHRunner", "SlurmRunner")
}

TABLE: Table = {
    "launcher": {},
    "launcher.constants": {**_CONSTANTS, "MVAPICH_TMP_HOSTFILE": f"{_LAUNCHER}:MVAPICH_TMP_HOSTFILE"},
    "launcher.launch": {"main": Refused(_WHY, function=True)},
    "launcher.launcher_helper": {"main": Refused(_WHY, function=True)},
    "launcher.multinode_runner": {"MultiNodeRunner": Refused(_WHY), **_RUNNERS},
    "launcher.runner": {
        **_CONSTANTS,
        **_RUNNERS,
        **{
            name: f"{_LAUNCHER}:{name}"
            for name in (
                "DEEPSPEED_ENVIRONMENT_NAME", "DEEPSPEED_ENVIRONMENT_PATHS", "DLTS_HOSTFILE", "EXCLUDE_ENVS",
                "EXPORT_ENVS", "_parse_hostfile", "apply_num_nodes_and_gpus", "encode_world_info", "fetch_hostfile",
                "parse_args", "parse_inclusion_exclusion", "parse_node_config", "parse_node_config_list",
                "parse_resource_filter",
            )
        },
        "TORCH_DISTRIBUTED_DEFAULT_PORT": "zoo.comm.launch:PORT",
        "get_accelerator": "zoo.deepspeed.adapters.accelerators:get_accelerator",
        "logger": "zoo.deepspeed.adapters.logs:logger",
        "main": Name(f"{_LAUNCHER}:main", "refused when it is called, with the command of torchrun."),
    },
}  # fmt: skip
