"""Jobs of many processes: hosts, slots and batch sizes that fit, and what starts, watches and ends them. No torch, and
no training.
"""

from zoo.launch.elastic import Elastic, Policy, shares, table, table_of_nodes
from zoo.launch.hosts import read_hostfile, select

__all__ = ["Elastic", "Policy", "read_hostfile", "select", "shares", "table", "table_of_nodes"]
