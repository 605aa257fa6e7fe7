# SPDX-License-Identifier: Apache-2.0
"""A rollout server of images: one transformer, the frozen parts around it, and the engine that steps it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import aclosing, suppress
from functools import partial
from typing import Any

import torch
from cachetools import LRUCache
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from verl.plugin.platform import get_platform
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.torch_dtypes import PrecisionType
from verl.workers.rollout.replica import RolloutReplica, TokenOutput

from ....diffusion.families import EMPTY, Conditions
from ....diffusion.model_folder import FrozenParts
from ....diffusion.step_engine import SampleRequest, Sampling, StepEngine
from ....diffusion.transformer_adapter import TransformerAdapter
from ....diffusion.windows import SdeWindow
from ....weight_sync.engine.serving_rank import ServingRank
from ....weight_sync.engine.versioned_engine import Loaded, Salts, VersionedEngine
from ....weight_sync.memory.manifest import decode
from ...calls.control_calls import server_actor
from ...cpu.cpu_platform import is_cpu
from ...workers.diffusion.diffusion_model import DiffusionModelConfig
from ..standalone_replica import StandaloneReplica
from ..versioned_server import VersionedServer
from .engine import DiffusersEngine, DrawnImage
from .fields import CONDITIONS, IMAGE, LATENTS, PICTURE, WANTED

KEPT_BYTES = 1 << 30
"""Of the conditions of recent prompts."""


class ImageServer:
    """Draws images, as verl's server classes generate text for other engines."""

    _engine: DiffusersEngine
    _versioned: VersionedEngine[SampleRequest, DrawnImage]
    _rank: ServingRank

    def __init__(self, config: Any, model_config: Any, replica_rank: int, node_rank: int) -> None:
        """`config`: verl's of the rollout; `model_config`: of a `DiffusionModelConfig`."""
        self.config, self._model_config = config, model_config
        self.replica_rank, self.node_rank = replica_rank, node_rank
        self.global_steps: int | None = None
        self._conditions: LRUCache[str, Conditions] = LRUCache(KEPT_BYTES, num_bytes)
        self._encoding = asyncio.Lock()

    async def _start(self) -> None:
        """Load the pipeline. Its transformer serves nothing until a version was loaded."""
        self._model: DiffusionModelConfig = await asyncio.to_thread(
            omega_conf_to_dataclass, self._model_config
        )
        device = torch.device("cpu" if is_cpu() else "cuda")
        transformer, self._frozen = await asyncio.to_thread(self._load, device)
        self._rank = ServingRank(TransformerAdapter(transformer, device))
        steps = StepEngine(
            partial(self._model.folder.family.velocity, transformer, scale=self._guidance_scale),
            max_rows=int(self.config.max_num_seqs),
            device=str(device),
        )
        self._engine = DiffusersEngine(steps, self._frozen.decode)
        self._versioned = VersionedEngine(self._engine)

    def _load(self, device: torch.device) -> tuple[torch.nn.Module, FrozenParts]:
        import diffusers

        how, folder = self._model, self._model.folder
        dtype = PrecisionType.to_dtype(self.config.dtype)
        of_family = getattr(diffusers, folder.family.transformer)
        transformer = of_family.from_pretrained(folder.transformer, torch_dtype=dtype, local_files_only=True)
        frozen = FrozenParts.load(
            folder,
            max_sequence_length=how.denoising.max_sequence_length,
            dtype=dtype,
            device=str(device),
        )
        return transformer.to(device).eval().requires_grad_(False), frozen

    async def generate(
        self, prompt_ids: Sequence[int], sampling_params: Mapping[str, Any], request_id: str, **_: Any
    ) -> TokenOutput:
        """Draw one image. `sampling_params` has its prompt, what is wanted, its seed, and its window: first
        SDE step and their number, or None for a sample without noise.
        """
        conditions, wanted = await self._encoded(str(sampling_params["prompt"])), sampling_params[WANTED]
        fields: dict[str, Any] = {CONDITIONS: conditions} if CONDITIONS in wanted else {}
        if IMAGE not in wanted:
            return TokenOutput(token_ids=[], log_probs=[], stop_reason="completed", extra_fields=fields)
        request = SampleRequest(
            name=request_id,
            conditions=conditions,
            seed=int(sampling_params["seed"]),
            sampling=self._sampling(sampling_params["window"]),
        )
        drawn: DrawnImage | None = None
        async with aclosing(self._versioned.generate(request)) as outputs:
            async for output in outputs:
                drawn = output
        assert drawn is not None and drawn.sample is not None and drawn.picture is not None
        sample = drawn.sample
        return TokenOutput(
            token_ids=list(sample.steps),
            log_probs=sample.log_probs.tolist(),
            stop_reason="completed",
            extra_fields={LATENTS: sample.latents.numpy(), PICTURE: drawn.picture.numpy(), **fields},
        )

    async def _encoded(self, prompt: str) -> Conditions:
        """Return the conditions of a prompt; requests of the same prompt wait for each other."""
        async with self._encoding:
            found = self._conditions.get(prompt)
            if found is None:
                with_empty = self._model.folder.family.guides_by_empty_prompt(self._guidance_scale)
                (found,) = await asyncio.to_thread(self._frozen.encode, [prompt], with_empty=with_empty)
                with suppress(ValueError):  # larger than what is kept
                    self._conditions[prompt] = found
        return found

    @property
    def _guidance_scale(self) -> float | None:
        scale: float | None = self._model.denoising.guidance_scale
        return scale

    def _sampling(self, window: Sequence[int] | None) -> Sampling:
        how = self._model.denoising
        shape = self._model.folder.latent_shape(how.height, how.width)
        if window is None:
            return Sampling(schedule=self._model.validation_schedule, shape=shape)
        first, size = window
        return Sampling(
            schedule=self._model.schedule,
            shape=shape,
            kind=how.sde_type,
            noise_level=how.noise_level,
            window=SdeWindow(int(first), int(size)),
        )


def num_bytes(conditions: Conditions) -> int:
    """Return the size of conditions, without the empty prompt's, which all prompts share."""
    return sum(one.nbytes for name, one in conditions.items() if not name.startswith(EMPTY))


class PipelineDiffusersServer(VersionedServer, ImageServer):
    """Records which version made which step; see `VersionedEngine`."""

    async def launch_server(self) -> str:
        """Load the pipeline and return the server's name."""
        await self._start()
        self.serve_control_calls()
        return f"images of replica {self.replica_rank}, server {self.node_rank}"

    async def _load_into_engine(
        self, manifest: bytes, piece_bytes: int, timeout_s: float, salts: Salts | None
    ) -> Loaded:
        version = decode(manifest).version
        loaded, progress = await self._engine.load(version, lambda: self._rank.load(manifest, piece_bytes))
        return Loaded([loaded[0]], progress)

    async def _stage_boards(self, manifest: bytes, timeout_s: float) -> list[str | None]:
        return [await self._engine.between_steps(lambda: self._rank.stage(manifest))]

    async def _answers(self) -> None:
        await self._engine.between_steps(lambda: None)

    def _death(self) -> BaseException | None:
        return self._engine.death


class DiffusersReplica(RolloutReplica):  # type: ignore[misc]
    """What verl's replica classes are for other engines."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.server_class = server_actor(PipelineDiffusersServer)

    async def launch_servers(self) -> None:
        """Start the server on the node of the reserved device."""
        (worker,) = self.workers
        node, device = await worker.where()
        platform = get_platform()
        environment = {
            **{name: "1" for name in platform.ray_noset_envvars()},
            **platform.rollout_env_vars(),
            platform.visible_devices_envvar(): str(device),
        }
        server = self.server_class.options(
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=node, soft=False),
            runtime_env={"env_vars": environment},
            name=f"image_server_{self.replica_rank}_0{self.name_suffix}",
            max_concurrency=self.max_concurrency,
        ).remote(
            config=self.config,
            model_config=self.model_config,
            replica_rank=self.replica_rank,
            node_rank=0,
        )
        self.servers.append(server)
        self._server_handle = server
        self._server_address = await server.launch_server.remote()


class PipelineDiffusersReplica(StandaloneReplica, DiffusersReplica):
    """A replica with this package's restarts."""
