"""Jobs of many processes: which hosts and slots they get, and batch sizes that fit. No torch, and no training."""

from zoo.launch.elastic import Elastic, Policy, shares, table, table_of_nodes
from zoo.launch.hosts import read_hostfile, select

__all__ = ["Elastic", "Policy", "read_hostfile", "select", "shares", "table", "table_of_nodes"]
