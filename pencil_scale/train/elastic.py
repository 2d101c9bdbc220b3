"""Elastic runs: which nodes their workers are counted on.

Ray 2.60 counts on every node that is alive, also on one that is about to leave and takes no more workers: it
starts as many workers as fit on both kinds, gives up, and starts them again until the node is gone. It offers
no public way to change this.
"""

from collections.abc import Mapping
from typing import Any

from ray.train.torch import TorchTrainer
from ray.train.v2._internal.execution.scaling_policy import (
    ElasticScalingPolicy,
    NoopDecision,
    ResizeDecision,
    ScalingDecision,
)
from ray.train.v2._internal.execution.worker_group import WorkerGroupPollStatus, WorkerGroupState

from pencil_scale.stream.ray_tasks import alive_nodes, leaving_nodes


class StayingNodes(ElasticScalingPolicy):
    """Counts workers on the nodes that stay; healthy workers are never made fewer."""

    def _get_num_workers_for_resource_request(self) -> int:
        """Reserve room for all workers beside the room on nodes that are about to leave."""
        leaving = leaving_nodes()
        lost = {node["NodeID"]: node["Resources"] for node in alive_nodes() if node["NodeID"] in leaving}
        return self.scaling_config.max_workers + super()._count_possible_workers(lost)

    def _count_possible_workers(self, reserved_resources: Mapping[str, Any]) -> int:
        leaving = leaving_nodes()
        staying = {node: found for node, found in reserved_resources.items() if node not in leaving}
        return super()._count_possible_workers(staying)

    def make_decision_for_running_worker_group(
        self, worker_group_state: WorkerGroupState, worker_group_status: WorkerGroupPollStatus
    ) -> ScalingDecision:
        decision = super().make_decision_for_running_worker_group(worker_group_state, worker_group_status)
        if isinstance(decision, ResizeDecision) and decision.num_workers < worker_group_state.num_workers:
            return NoopDecision()  # workers on a node that is about to leave save, and end by themselves
        return decision


class ElasticTrainer(TorchTrainer):
    """A trainer with a fixed or variable number of workers."""

    def _initialize_and_run_controller(self, **options: Any) -> Any:
        scaling: Any = self.scaling_config
        if scaling.elasticity_enabled:
            options["scaling_policy"] = StayingNodes(scaling)
        return super()._initialize_and_run_controller(**options)  # type: ignore[misc]
