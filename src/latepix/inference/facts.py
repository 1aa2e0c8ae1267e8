"""How a server or a trainer is set up, in plain values, and what a difference between the two means.

In: `Facts` of both sides (the server's over HTTP, the trainer's from a file of the run folder). Out: a list of
differences; one that changes pixels, tokens or logprobs is fatal.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from typing import Any

import msgspec

from latepix.config.schema import RunConfig
from latepix.errors import HandshakeFailed
from latepix.families.model_info import ModelInfo
from latepix.inference.contract import version_label

#: Settings of an image processor that decide on pixels or counts, by Hugging Face's names (Qwen-VL and Kimi).
_PIXEL_SETTINGS = (
    "patch_size",
    "merge_size",
    "temporal_patch_size",
    "do_rescale",
    "rescale_factor",
    "do_normalize",
    "image_mean",
    "image_std",
    "do_convert_rgb",
    "merge_kernel_size",
    "in_patch_limit",
    "patch_limit_on_one_side",
    "fixed_output_tokens",
)
#: Settings that matter only to a picture that is resized, which ours are not after ingress.
_RESIZE_SETTINGS = ("do_resize", "resample")


class TokenizerFacts(msgspec.Struct, frozen=True):
    """A tokenizer.

    Attributes:
        vocab_sha256: see `vocab_sha256`; of the vocabulary without added tokens.
        vocab_size: number of tokens in it.
        added_ids: added tokens, special or not, and their ids.
    """

    vocab_sha256: str
    vocab_size: int
    added_ids: dict[str, int]


class Facts(msgspec.Struct, frozen=True):
    """One side. None: it does not say.

    Attributes:
        engine: `vllm`, `local` or `trainer`.
        versions: of the engine and the packages below it.
        model: folder it was loaded from.
        model_type: Hugging Face's name of the family.
        dtype: of the weights, such as `float32`.
        max_model_len: tokens of prompt and answer.
        max_num_seqs: most answers to one request.
        data_parallel_size: ranks that requests may be sent to.
        logprobs_mode: vLLM's name of which logprobs it returns.
        weight_version: label of the weights that are served.
        weight_transfer: backend for weight updates.
        prefix_caching: whether prompts are reused.
        tokenizer: its facts.
        image_processor: Hugging Face's settings of the image processor.
        mm_limits: pictures of one prompt, by modality.
        canary_sha256: of the trainer's canary prompts.
    """

    engine: str
    versions: dict[str, str] = {}
    model: str | None = None
    model_type: str | None = None
    dtype: str | None = None
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    data_parallel_size: int | None = None
    logprobs_mode: str | None = None
    weight_version: str | None = None
    weight_transfer: str | None = None
    prefix_caching: bool | None = None
    tokenizer: TokenizerFacts | None = None
    image_processor: dict[str, Any] | None = None
    mm_limits: dict[str, int] = {}
    canary_sha256: str | None = None


class Needs(msgspec.Struct, frozen=True):
    """What a run asks of its server.

    Attributes:
        max_model_len: longest prompt and answer, tokens.
        group_size: answers to one request.
        max_images: pictures of one prompt.
        weight_transfer: backend for weight updates; None if the server needs none.
        data_parallel_size: ranks that requests will be sent to.
        is_fitted: pictures come in sizes that no processor resizes.
    """

    max_model_len: int
    group_size: int
    max_images: int
    weight_transfer: str | None
    data_parallel_size: int
    is_fitted: bool


class Difference(msgspec.Struct, frozen=True):
    """One setting that is not the same on both sides, or that the server does not tell.

    Attributes:
        setting: its name.
        server, trainer: both values (or what is needed), as text.
        is_fatal: it changes pixels, tokens or logprobs, or requests would be refused.
        remedy: what to do.
    """

    setting: str
    server: str
    trainer: str
    is_fatal: bool
    remedy: str = ""


def needs_of(config: RunConfig, info: ModelInfo) -> Needs:
    """Return what a run with a model asks of its server."""
    inference = config.inference
    return Needs(
        # No rollout asks for more than the model has positions.
        max_model_len=info.max_len(inference.max_model_len),
        group_size=config.orchestrator.group_size,
        max_images=config.images.max_per_prompt,
        weight_transfer=None if inference.weight_update == "reload_weights" else inference.weight_update,
        data_parallel_size=inference.vllm.data_parallel_size,
        is_fitted=config.images.fit,
    )


def vocab_sha256(vocab: Mapping[str, int]) -> str:
    """Return the hash of a vocabulary: of the lines `id<tab>token`, by id, UTF-8."""
    digest = hashlib.sha256()
    for token, index in sorted(vocab.items(), key=lambda item: (item[1], item[0])):
        digest.update(f"{index}\t{token}\n".encode("utf-8", errors="surrogatepass"))
    return digest.hexdigest()


def facts_of_server_info(info: Mapping[str, Any], *, version: str, weight_version: str) -> Facts:
    """Read what a vLLM without our plugin tells in `/server_info?config_format=json`.

    Tokenizer and image processor are not in it: the handshake warns that it could not compare them.
    """
    config = info.get("vllm_config") or {}
    model = config.get("model_config") or {}
    transfer = config.get("weight_transfer_config") or {}
    return Facts(
        engine="vllm",
        versions={"engine": version},
        model=model.get("model"),
        dtype=str(model["dtype"]).removeprefix("torch.") if "dtype" in model else None,
        max_model_len=model.get("max_model_len"),
        max_num_seqs=(config.get("scheduler_config") or {}).get("max_num_seqs"),
        data_parallel_size=(config.get("parallel_config") or {}).get("data_parallel_size"),
        logprobs_mode=model.get("logprobs_mode"),
        weight_version=weight_version,
        weight_transfer=transfer.get("backend"),
        prefix_caching=(config.get("cache_config") or {}).get("enable_prefix_caching"),
    )


def compare_facts(server: Facts, trainer: Facts, needs: Needs) -> list[Difference]:
    """Compare both sides, and the server with what the run needs; fatal differences come first."""
    found = [
        *_compare_models(server, trainer),
        *_compare_tokenizers(server.tokenizer, trainer.tokenizer),
        *_compare_processors(server.image_processor, trainer.image_processor, needs),
        *_check_needs(server, needs),
    ]
    return sorted(found, key=lambda difference: not difference.is_fatal)


def check_handshake(server: Facts, trainer: Facts, needs: Needs) -> list[Difference]:
    """Refuse a server that would serve something else than is trained.

    Returns:
        The harmless differences.
    Raises:
        HandshakeFailed: lists every fatal one, with both values.
    """
    differences = compare_facts(server, trainer, needs)
    fatal = [difference for difference in differences if difference.is_fatal]
    if fatal:
        lines = "\n".join(
            f"  {one.setting}: server {one.server}, trainer {one.trainer}. {one.remedy}".rstrip() for one in fatal
        )
        raise HandshakeFailed(
            f"Server and trainer do not fit each other ({len(fatal)} of their settings); nothing was trained:\n{lines}"
        )
    return differences


def _compare_models(server: Facts, trainer: Facts) -> list[Difference]:
    found = []
    if server.model_type and server.model_type != trainer.model_type:
        found.append(_fatal("model_type", server.model_type, trainer.model_type, "Serve the model that is trained."))
    if server.dtype is None:
        found.append(_unknown("dtype", server.dtype, trainer.dtype))
    elif server.dtype != trainer.dtype:
        found.append(
            _fatal("dtype", server.dtype, trainer.dtype, "Set model.dtype, or vLLM's --dtype, to the same on both.")
        )
    if server.model != trainer.model:
        # Another path may well be the same model; whether it is, the canary shows.
        found.append(_harmless("model folder", server.model, trainer.model))
    for name in sorted(server.versions.keys() & trainer.versions.keys() - {"engine"}):
        if server.versions[name] != trainer.versions[name]:
            found.append(_harmless(f"version of {name}", server.versions[name], trainer.versions[name]))
    return found


def _compare_tokenizers(server: TokenizerFacts | None, trainer: TokenizerFacts | None) -> list[Difference]:
    if server is None or trainer is None:
        return [_unknown("tokenizer", server, trainer)]
    remedy = "Use the tokenizer of the same model folder on both sides."
    found = []
    if server.vocab_sha256 != trainer.vocab_sha256:
        found.append(
            _fatal(
                "vocabulary",
                f"{server.vocab_size} tokens, sha256 {server.vocab_sha256[:12]}",
                f"{trainer.vocab_size} tokens, sha256 {trainer.vocab_sha256[:12]}",
                remedy,
            )
        )
    for token in sorted(server.added_ids.keys() | trainer.added_ids.keys()):
        ids = server.added_ids.get(token), trainer.added_ids.get(token)
        if None in ids:
            # Libraries add a token of their own at the end (a padding token, say); we only ever send ids.
            found.append(_harmless(f"added token {token}", ids[0], ids[1]))
        elif ids[0] != ids[1]:
            found.append(_fatal(f"added token {token}", ids[0], ids[1], remedy))
    return found


def _compare_processors(
    server: Mapping[str, Any] | None, trainer: Mapping[str, Any] | None, needs: Needs
) -> list[Difference]:
    if server is None or trainer is None:
        return [_unknown("image processor", server, trainer)]
    found = []
    remedy = "Use the same preprocessor_config.json, and no --mm-processor-kwargs."
    for name in _PIXEL_SETTINGS:
        if _same(server.get(name), trainer.get(name)):
            continue
        # Another class (vLLM has one of its own for Kimi) may do a thing without having a setting for it; whether it
        # does, `latepix doctor` shows by its pixels, and the canary by what is answered.
        is_silent = name not in server and server.get("class") != trainer.get("class")
        make = _harmless if is_silent else _fatal
        found.append(make(f"image processor: {name}", server.get(name), trainer.get(name), remedy))
    for name, *keys in (
        ("fewest pixels", "shortest_edge", "min_pixels"),
        ("most pixels", "longest_edge", "max_pixels"),
    ):
        theirs, ours = (_pixel_limit(side, *keys) for side in (server, trainer))
        if theirs != ours:
            found.append(_fatal(f"image processor: {name}", theirs, ours, remedy))
    for name in _RESIZE_SETTINGS:
        values = server.get(name), trainer.get(name)
        if not _same(*values):
            make = _harmless if needs.is_fitted else _fatal
            found.append(make(f"image processor: {name}", *values, f"{remedy} Or set images.fit = true."))
    if server.get("class") != trainer.get("class"):
        found.append(_harmless("image processor: class", server.get("class"), trainer.get("class")))
    return found


def _check_needs(server: Facts, needs: Needs) -> list[Difference]:
    found = []
    if server.engine == "vllm" and server.logprobs_mode != "processed_logprobs":
        found.append(
            _fatal(
                "logprobs_mode",
                server.logprobs_mode,
                "needs processed_logprobs",
                "Start vLLM with --logprobs-mode processed_logprobs: others leave out temperature and banned ids.",
            )
        )
    for name, have, need, remedy in (
        ("max_model_len", server.max_model_len, needs.max_model_len, "Raise --max-model-len of the server."),
        ("max_num_seqs", server.max_num_seqs, needs.group_size, "Raise --max-num-seqs: a group is one request."),
        ("data_parallel_size", server.data_parallel_size, needs.data_parallel_size, "Set both to the same."),
    ):
        if have is not None and have < need:
            found.append(_fatal(name, have, f"needs at least {need}", remedy))
    for modality, limit in server.mm_limits.items():
        if modality in ("image", "vision_chunk") and limit < needs.max_images:
            found.append(
                _fatal(
                    "pictures in a prompt",
                    limit,
                    f"needs {needs.max_images} (images.max_per_prompt)",
                    f"Start vLLM with --limit-mm-per-prompt '{{\"{modality}\": {needs.max_images}}}'.",
                )
            )
    if needs.weight_transfer and server.weight_transfer != needs.weight_transfer:
        found.append(
            _fatal(
                "weight transfer",
                server.weight_transfer,
                f"needs {needs.weight_transfer}",
                "Install latepix-vllm beside vLLM and start it with --weight-transfer-config "
                f'\'{{"backend": "{needs.weight_transfer}"}}\', or set inference.weight_update.',
            )
        )
    if server.weight_version not in (None, "default", version_label(0)):
        found.append(
            _fatal("weight version", server.weight_version, "starts at step-0", "It serves another run: start it anew.")
        )
    return found


def _pixel_limit(processor: Mapping[str, Any], key: str, older_key: str) -> Any:
    size = processor.get("size")
    value = size.get(key) if isinstance(size, Mapping) else None
    return value if value is not None else processor.get(older_key)


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, float) and isinstance(other, float | int):
        return math.isclose(one, other, rel_tol=1e-9)
    return one == other


def _fatal(setting: str, server: Any, trainer: Any, remedy: str = "") -> Difference:
    return Difference(setting=setting, server=str(server), trainer=str(trainer), is_fatal=True, remedy=remedy)


def _harmless(setting: str, server: Any, trainer: Any, remedy: str = "") -> Difference:
    return Difference(setting=setting, server=str(server), trainer=str(trainer), is_fatal=False, remedy=remedy)


def _unknown(setting: str, server: Any, trainer: Any) -> Difference:
    said = ["not told" if side is None else "known" for side in (server, trainer)]
    return _harmless(setting, *said, "Install latepix-vllm beside vLLM to compare it.")
