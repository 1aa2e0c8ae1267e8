"""`latepix doctor`: do the running server and the trainer see the same pictures?

The settings of both sides are compared first; then every case goes through both. A difference is shown and the doctor
goes on, to show its effect. Everything is written to `output_dir`/doctor, beside a run that may be there.
"""

from __future__ import annotations

import asyncio
import time

import msgspec

from latepix.config.schema import DoctorConfig, RunConfig
from latepix.errors import ConfigError, TransportError
from latepix.families.facts import local_facts
from latepix.families.model_info import ModelInfo, read_model_info
from latepix.inference.control import ServerControl
from latepix.inference.facts import Difference, compare_facts, needs_of
from latepix.launcher import at_server, inference_server
from latepix.orchestrator.server import client_of, routing_of
from latepix.parity.cases import conversation_cases, picture_cases
from latepix.parity.examine import Examiner, TrainerSide, ensure_alive
from latepix.parity.findings import Findings
from latepix.parity.pack import picture_pack
from latepix.transport.files import write_bytes

#: Tokens of a picture's prompt beside the picture.
_TEXT_TOKENS = 64


def run_doctor(config: DoctorConfig) -> int:
    """Take the picture pack and every shape of conversation through server and trainer, and print what differs.

    Returns:
        The exit status: 0 if everything agrees, 1 if anything does not.
    Raises:
        ConfigError: before anything is started.
        ProcessFailed: the server died, or never came up.
    """
    info = read_model_info(config.model.path)
    folder = config.output_dir / "doctor"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"output_dir: cannot make {folder}: {error.strerror or error}.") from error
    run = config.model_copy(update={"output_dir": folder})
    with inference_server(run) as base_url:
        findings = asyncio.run(_examine_all(at_server(run, base_url), info, config.doctor.max_pixel_difference))
    write_bytes(folder / "doctor.json", findings.to_json())
    write_bytes(folder / "doctor.md", findings.to_markdown().encode())
    findings.show()
    print(f"written to {folder}/doctor.json and doctor.md")
    return 1 if findings.num_failed else 0


async def _examine_all(config: RunConfig, info: ModelInfo, tolerance: float) -> Findings:
    trainer = TrainerSide(config, info)
    pack = picture_pack(info.grid, max_tokens=trainer.max_tokens - _TEXT_TOKENS)
    client = client_of(config, info)
    control = ServerControl(client.connection)
    examiner = Examiner(trainer, client, control, routing=routing_of(config, 0), tolerance=tolerance)
    started = time.monotonic()
    try:
        differences = await _compare_settings(config, control, info)
        # One at a time: a request that kills the server is then known by name.
        rows = [await examiner.examine(case) for case in [*picture_cases(pack), *conversation_cases(info.grid)]]
    finally:
        await client.close()
    return Findings(
        server=config.inference.base_url,
        model=str(config.model.path),
        is_fitted=config.images.fit,
        has_pixels=examiner.has_pixels,
        max_pixel_difference=tolerance,
        differences=differences,
        rows=rows,
        wall_s=time.monotonic() - started,
    )


async def _compare_settings(config: RunConfig, control: ServerControl, info: ModelInfo) -> list[Difference]:
    trainer = local_facts(config.model.path, engine="trainer", dtype=config.model.dtype)
    try:
        server = await control.facts()
    except TransportError as error:
        await ensure_alive(control, error)
        return [Difference(setting="facts of the server", server=str(error), trainer="known", is_fatal=True)]
    # A server in the middle of a run is as good to examine as a new one.
    server = msgspec.structs.replace(server, weight_version=None)
    return compare_facts(server, trainer, needs_of(config, info))
