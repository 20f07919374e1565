"""Faults of checkpoints as people have them, which can be composed: each changes a directory before it is written."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.compressor.helpers.compressing import SINGLE
from tests.helpers.tiny_models import CHAT_TEMPLATE, VOCAB_SIZE, make_pair

INDEX = "model.safetensors.index.json"
GENERATION, TOKENIZER = "generation_config.json", "tokenizer.json"
STEP = 2.0**-4  # between a weight and its base's
ENDS = {
    "gpt_neox": ("gpt_neox.embed_in.weight", "embed_out.weight"),
    "default": ("model.embed_tokens.weight", "lm_head.weight"),
}


@dataclass(slots=True, eq=False, repr=False)
class Form:
    """A checkpoint's directory before it is written."""

    config: dict[str, Any]
    tensors: dict[str, Tensor]
    files: dict[str, bytes]
    embedding: str  # names of the ends as transformers saves them
    head: str
    num_shards: int = 1
    # Called when everything else is written.
    at_end: list[Callable[[Path], object]] = field(default_factory=list)

    def _repr_pretty_(self, printer: Any, is_cycle: bool) -> None:
        # Hypothesis prints the arguments of each example where another test has turned its observations on.
        printer.text(f"<Form of {len(self.tensors)} tensors>")

    @classmethod
    def read(cls, directory: Path) -> Form:
        """Read what `save_pretrained` wrote."""
        names = [path.name for path in directory.iterdir() if path.name not in (SINGLE, "config.json")]
        config = json.loads((directory / "config.json").read_text())
        files = {name: (directory / name).read_bytes() for name in names}
        embedding, head = ENDS.get(config["model_type"], ENDS["default"])
        return cls(config, load_file(directory / SINGLE), files, embedding, head)

    def copy(self) -> Form:
        tensors = {name: tensor.clone() for name, tensor in self.tensors.items()}
        return replace(
            self,
            config=copy.deepcopy(self.config),
            tensors=tensors,
            files=dict(self.files),
            at_end=[*self.at_end],
        )

    def write(self, directory: Path) -> None:
        directory.mkdir()
        (directory / "config.json").write_text(json.dumps(self.config))
        for name, content in self.files.items():
            (directory / name).parent.mkdir(exist_ok=True)
            (directory / name).write_bytes(content)
        names = list(self.tensors)
        if self.num_shards == 1:
            save_file(self.tensors, directory / SINGLE, metadata={"format": "pt"})
        else:
            weight_map: dict[str, str] = {}
            for number in range(self.num_shards):
                file = f"model-{number + 1:05}-of-{self.num_shards:05}.safetensors"
                own = {name: self.tensors[name] for name in names[number :: self.num_shards]}
                save_file(own, directory / file, metadata={"format": "pt"})
                weight_map |= dict.fromkeys(own, file)
            (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
        for change in self.at_end:
            change(directory)


@dataclass(frozen=True, slots=True, eq=False)
class Fault:
    """A change of one side of a pair."""

    name: str
    change: Callable[[Form], object]
    # A spelling means the same to `compress` and not to transformers. Harmless ones are accepted, alone or together.
    is_spelling: bool = False
    is_harmless: bool = False
    # Faults of one place exclude each other.
    place: str = ""

    def __repr__(self) -> str:
        return self.name


def exact_pair(architecture: str, directory: Path) -> tuple[Form, Form]:
    """Return a base and a fine-tune whose difference one bit per weight holds exactly, in every dtype of floats."""
    base = Form.read(make_pair(architecture, directory, changes=()).base)
    generator = torch.Generator().manual_seed(1)
    for name, tensor in base.tensors.items():
        step = STEP / 32 if name == base.embedding else STEP / 4
        base.tensors[name] = (tensor / step).round().clamp(-120, 120) * step
    finetune = base.copy()
    for name, tensor in finetune.tensors.items():
        signs = torch.randint(2, tensor.shape, generator=generator) * 2 - 1
        tensor.add_((STEP / 8 if name == base.embedding else STEP) * signs)
    return base, finetune


# Fields of which transformers fails or takes a package, and which a delta has no use for.
UNREAD = {"attn_implementation", "_attn_implementation", "pad_token_id", "quantization_config"}


def _config(_harmless: bool = False, **values: Any) -> Fault:
    named = ", ".join(f"{key}={str(value)[:40]}" for key, value in values.items())
    return Fault(
        f"config: {named}",
        lambda form: form.config.update(copy.deepcopy(values)),
        is_spelling=not UNREAD.isdisjoint(values),
        is_harmless=_harmless,
        place=f"config.{min(values)}",
    )


def _without(key: str) -> Fault:
    return Fault(f"config: no {key}", lambda form: form.config.pop(key, None), place=f"config.{key}")


HARMLESS: tuple[dict[str, Any], ...] = (
    {"tokenizer_class": "Own"}, {"cache_implementation": "static"}, {"gradient_checkpointing": True},
    {"use_flash_attn": True}, {"attn_implementation": "flash_attention_2"}, {"own_field": [1, {"a": 2}]},
    {"_attn_implementation": "flash_attention_2"}, {"auto_map": {"AutoModelForCausalLM": "own.Model"}},
    {"attention_dropout": 0.1}, {"initializer_range": 0.5}, {"pad_token_id": 100_000}, {"pad_token_id": None},
    {"eos_token_id": [257, 258]}, {"torch_dtype": "float16"}, {"use_cache": False}, {"_name_or_path": "/root/x"},
    {"architectures": ["Own"]}, {"transformers_version": "3.0.0"}, {"id2label": {"0": "A"}},
    {"unsloth_version": "1"}, {"max_position_embeddings": 512}, {"max_position_embeddings": 128},
)  # fmt: skip
MEANT: tuple[dict[str, Any], ...] = (
    {"hidden_act": "swish"}, {"hidden_act": "gelu"}, {"hidden_act": "relu"}, {"rms_norm_eps": 1e-2},
    {"layer_norm_eps": 1e-2}, {"rope_theta": 5e5}, {"rope_theta": 1e4}, {"rope_parameters": None},
    {"rope_parameters": None, "rope_theta": 500.0}, {"rope_parameters": None, "rope_theta": 1e4},
    {"rope_scaling": {"type": "linear", "factor": 2.0}}, {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
    {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
    {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}},
    {"rope_scaling": {"rope_type": "default"}}, {"rope_scaling": None}, {"partial_rotary_factor": 0.5},
    {"attention_bias": True}, {"mlp_bias": True}, {"head_dim": 16}, {"head_dim": 32}, {"head_dim": None},
    {"num_key_value_heads": 4}, {"num_key_value_heads": 1}, {"num_key_value_heads": None},
    {"num_attention_heads": 2}, {"num_attention_heads": 8}, {"num_hidden_layers": 1}, {"num_hidden_layers": 3},
    {"intermediate_size": 64}, {"hidden_size": 128}, {"vocab_size": VOCAB_SIZE + 8}, {"vocab_size": 200},
    {"sliding_window": 4}, {"sliding_window": None}, {"use_sliding_window": True, "sliding_window": 4},
    {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4, "use_sliding_window": True},
    {"layer_types": ["full_attention", "full_attention"]}, {"layer_types": ["full_attention"]},
    {"model_type": "mistral"}, {"model_type": "llama"}, {"model_type": "unheard-of"}, {"dtype": "auto"},
    {"dtype": "float16"}, {"torch_dtype": "auto"}, {"pretraining_tp": 2}, {"is_encoder_decoder": True},
    {"attention_multiplier": 0.5}, {"final_logit_softcapping": 5.0}, {"logits_scaling": 2.0},
    {"quantization_config": {"quant_method": "gptq", "bits": 4}}, {"quantization_config": None},
    {"text_config": {"hidden_size": 32}}, {"rotary_pct": 0.5}, {"use_parallel_residual": False},
    {"eos_token_id": "257"}, {"pad_token_id": -1}, {"eos_token_id": [[257]]}, {"hidden_activation": "gelu"},
    {"use_bidirectional_attention": True}, {"is_causal": False}, {"is_decoder": True}, {"add_cross_attention": True},
    {"chunk_size_feed_forward": 8}, {"rms_norm_eps": "1e-5"}, {"rope_theta": "10000"}, {"use_cache": None},
    {"attention_dropout": "none"}, {"max_position_embeddings": None}, {"max_position_embeddings": 0},
    {"max_position_embeddings": "256"}, {"tie_word_embeddings": None}, {"tie_word_embeddings": "true"},
    {"num_hidden_layers": "2"}, {"vocab_size": None}, {"attn_logit_softcapping": 1.0}, {"query_pre_attn_scalar": 4},
)  # fmt: skip
CONFIGS = (
    *(_config(_harmless=True, **values) for values in HARMLESS),
    *(_config(**values) for values in MEANT),
    *map(
        _without,
        (
            "rms_norm_eps", "rope_parameters", "hidden_act", "num_key_value_heads", "head_dim", "dtype",
            "max_position_embeddings", "vocab_size", "model_type", "architectures", "sliding_window", "layer_types",
            "bos_token_id", "rotary_pct", "use_sliding_window", "transformers_version",
        ),
    ),
)  # fmt: skip


def _end(name: str, change: Callable[[Form], object]) -> Fault:
    return Fault(f"ends: {name}", change, place="ends")


def _both(form: Form, *, equal: bool) -> None:
    source = form.tensors.get(form.embedding, form.tensors.get(form.head))
    assert source is not None
    form.tensors.setdefault(form.embedding, source.clone())
    head = form.tensors.get(form.head)
    form.tensors[form.head] = source.clone() if equal or head is None else head
    if not equal and head is None:
        form.tensors[form.head] += STEP


def _tie(form: Form, value: bool | None) -> None:
    if value is None:
        form.config.pop("tie_word_embeddings", None)
    else:
        form.config["tie_word_embeddings"] = value


def _ends(tied: bool | None, stored: str) -> Callable[[Form], None]:
    def change(form: Form) -> None:
        _tie(form, tied)
        if stored in ("equal", "different"):
            _both(form, equal=stored == "equal")
        elif stored == "embedding":
            form.tensors.pop(form.head, None)
        elif stored == "head":
            form.tensors.setdefault(form.head, form.tensors[form.embedding])
            del form.tensors[form.embedding]

    return change


def _rows(embedding: int, head: int, config: int) -> Callable[[Form], None]:
    """Add rows, or take some off."""

    def change(form: Form) -> None:
        for name, count in ((form.embedding, embedding), (form.head, head)):
            if (tensor := form.tensors.get(name)) is None:
                continue
            more = torch.full((max(0, count), tensor.shape[1]), STEP)
            form.tensors[name] = torch.cat([tensor[: tensor.shape[0] + min(0, count)], more.to(tensor.dtype)])
        form.config["vocab_size"] += config

    return change


ENDS_FAULTS = (
    *(
        _end(f"{stored}, {tied}", _ends(tied, stored))
        for stored in ("as they are", "equal", "different", "embedding", "head")
        for tied in (True, False, None)
    ),
    *(
        Fault(f"rows: {counts}", _rows(*counts), place="rows")
        for counts in ((3, 3, 3), (3, 3, 0), (3, 0, 3), (0, 3, 3), (-3, -3, -3), (-3, -3, 0), (64, 64, 64))
    ),
)


def _file(name: str, content: Any, *, alone: bool = False, harmless: bool = False) -> Fault:
    """Put a file beside the weights; `alone` takes all others of the tokenizer away."""

    def change(form: Form) -> None:
        if alone:
            _without_tokenizer(form)
        text = content if isinstance(content, str) else json.dumps(content)
        form.files[name] = text.encode()

    shown = f"file: {name}{' alone' if alone else ''} {str(content)[:40]!r}"
    return Fault(shown, change, is_harmless=harmless, place="tokenizer" if alone else name)


def _without_tokenizer(form: Form) -> None:
    for name in [*form.files]:
        if name.startswith("tokenizer") or name.endswith(".jinja"):
            del form.files[name]


def _generation(harmless: bool = False, **values: Any) -> Fault:
    def change(form: Form) -> None:
        known = json.loads(form.files.get(GENERATION) or b"{}")
        form.files[GENERATION] = json.dumps({**known, **values}).encode()

    return Fault(f"generation: {values}", change, is_harmless=harmless, place=GENERATION)


FILES = (
    Fault("file: no tokenizer", _without_tokenizer, place="tokenizer", is_harmless=True),
    Fault(f"file: no {TOKENIZER}", lambda form: form.files.pop(TOKENIZER, None), place="tokenizer"),
    Fault(
        f"file: {TOKENIZER} cut",
        lambda form: form.files.update({TOKENIZER: form.files.get(TOKENIZER, b"{}")[:-9]}),
        place="tokenizer",
    ),
    Fault(
        f"file: no {GENERATION}",
        lambda form: form.files.pop(GENERATION, None),
        place=GENERATION,
        is_harmless=True,
    ),
    _file("special_tokens_map.json", {"eos_token": "<pad>"}, alone=True, harmless=True),
    _file("special_tokens_map.json", {"eos_token": "<pad>"}),
    _file("special_tokens_map.json", [], alone=True),
    _file("special_tokens_map.json", "{"),
    _file(
        "tokenizer_config.json",
        {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<pad>"},
        alone=True,
    ),
    _file("tokenizer_config.json", {"tokenizer_class": "LlamaTokenizer"}),
    _file("tokenizer_config.json", {"tokenizer_class": "Unheard", "eos_token": "</s>"}),
    _file("tokenizer_config.json", {"chat_template": CHAT_TEMPLATE, "eos_token": "</s>"}),
    _file(
        "tokenizer_config.json", {"chat_template": [{"name": "rag", "template": "R"}], "eos_token": "</s>"}
    ),
    _file("tokenizer_config.json", []),
    _file("added_tokens.json", {"<pad>": 258}, alone=True, harmless=True),
    _file("added_tokens.json", {"<new>": 259}, alone=True),
    _file("added_tokens.json", {"<new>": 259}),
    _file("chat_template.jinja", CHAT_TEMPLATE, harmless=True),
    _file("chat_template.jinja", CHAT_TEMPLATE, alone=True, harmless=True),
    _file("chat_template.jinja", "{% if %}"),
    _file("additional_chat_templates/rag.jinja", "R", harmless=True),
    _file("additional_chat_templates/rag.jinja", "R", alone=True, harmless=True),
    _file("tekken.json", "{}", alone=True),
    _file("tekken.json", "{}"),
    _file("tokenizer.model", "text", alone=True),
    _file("tokenizer.model", "text"),
    _file("vocab.json", "{}", alone=True),
    _file("merges.txt", "", alone=True),
    _file("README.md", "---\nbase_model: some/base\n---\n"),
    _file(GENERATION, []),
    _file(GENERATION, {}, harmless=True),
    _file(GENERATION, "{"),
    _file("processor_config.json", {"a": 1}, harmless=True),
    _file("training_args.bin", "x", harmless=True),
    _generation(eos_token_id=[257, 3], harmless=True),
    _generation(eos_token_id=10**6),
    _generation(eos_token_id=[3, 10**6]),
    _generation(eos_token_id="257"),
    _generation(eos_token_id=[]),
    _generation(eos_token_id=[[257]]),
    _generation(eos_token_id=True),
    _generation(eos_token_id=257.0),
    _generation(pad_token_id=-1),
    _generation(bos_token_id=None, harmless=True),
    _generation(bad_words_ids=[[VOCAB_SIZE]]),
    _generation(bad_words_ids=[[5]], harmless=True),
    _generation(suppress_tokens=[5, 10**6]),
    _generation(forced_eos_token_id=10**6),
    _generation(temperature="hot"),
    _generation(temperature=0.0),
    _generation(do_sample=False, temperature=0.3),
    _generation(max_new_tokens=5, harmless=True),
    _generation(max_length=-5),
    _generation(own=[1]),
    _generation(repetition_penalty=0),
    _generation(stop_strings="x"),
    _generation(num_beams=4),
)


def _renamed(name: str, name_of: Callable[[str], str]) -> Fault:
    def change(form: Form) -> None:
        form.tensors = {name_of(own): tensor for own, tensor in form.tensors.items()}

    return Fault(f"names: {name}", change, is_spelling=True, place="names")


def _more(name: str, value: Tensor, harmless: bool = True) -> Fault:
    return Fault(
        f"more: {name}", lambda form: form.tensors.update({name: value.clone()}), is_harmless=harmless
    )


def _dtype(dtype: torch.dtype, part: str = "", harmless: bool = True) -> Fault:
    def change(form: Form) -> None:
        for name, tensor in form.tensors.items():
            if part in name and tensor.is_floating_point():
                form.tensors[name] = tensor.to(dtype)

    return Fault(f"dtype: {part or 'all'} {dtype}", change, is_harmless=harmless, place="dtype")


def _value(name: str, part: str, change: Callable[[Tensor], Tensor], spelling: bool = False) -> Fault:
    def change_one(form: Form) -> None:
        found = next((own for own in form.tensors if part in own), None)
        if found is not None:
            form.tensors[found] = change(form.tensors[found])

    return Fault(f"values: {name} {part}", change_one, is_spelling=spelling)


def _lost(part: str) -> Fault:
    def change(form: Form) -> None:
        for name in [name for name in form.tensors if part in name]:
            del form.tensors[name]

    return Fault(f"lost: {part}", change)


def _empty(tensor: Tensor) -> Tensor:
    return torch.zeros(0, dtype=tensor.dtype)


NAMES = (
    _renamed("parallel", lambda name: f"module.{name}"),
    _renamed("compiled", lambda name: f"_orig_mod.{name}"),
    _renamed("both", lambda name: f"module._orig_mod.{name}"),
    _renamed("peft", lambda name: f"base_model.model.{name}"),
    _renamed("recomputed", lambda name: name.replace("mlp.", "mlp._checkpoint_wrapped_module.")),
    _renamed("trl", lambda name: f"pretrained_model.{name}"),
    _renamed("lightning", lambda name: f"model.{name}"),
    _renamed("body", lambda name: name.removeprefix("model.").removeprefix("gpt_neox.")),
    _renamed("wrapper", lambda name: f"language_model.{name}"),
    _renamed("tower", lambda name: name.replace("model.", "model.language_model.", 1)),
    _more("v_head.summary.weight", torch.ones(1, 64)),
    _more("value_head.weight", torch.ones(1, 64)),
    _more("model.layers.0.self_attn.k_scale", torch.tensor(1.0)),
    _more("mtp.layers.0.fc.weight", torch.ones(3, 64)),
    _more("model.layers.2.mlp.up_proj.weight", torch.ones(92, 64)),
    _more("model.layers.0.self_attn.rotary_emb.inv_freq", torch.ones(8)),
    _more("model.rotary_emb.inv_freq", torch.ones(8)),
    _more("gpt_neox.layers.0.attention.bias", torch.ones(1, 1, 8, 8).bool()),
    _more("model.position_ids", torch.arange(9)[None]),
    _more("model.layers.0.self_attn.q_proj.bias", torch.ones(64), harmless=False),
    _more("model.layers.0.mlp.up_proj.lora_A.weight", torch.ones(2, 64), harmless=False),
    _more("model.layers.0.mlp.up_proj.qweight", torch.ones(2, 64), harmless=False),
    _more("score.weight", torch.ones(2, 64), harmless=False),
    _value("empty", "layers.1.mlp", _empty),
    _value("empty", "norm", _empty),
    _value("empty", "embed", _empty),
    _value("empty rows", "layers.1.mlp", lambda tensor: tensor[:0]),
    _value("scalar", "norm", lambda tensor: tensor.flatten()[0].clone()),
    _value("flat", "layers.0.mlp", lambda tensor: tensor.flatten()),
    _value("transposed", "layers.0.mlp", lambda tensor: tensor.permute(*reversed(range(tensor.ndim))).contiguous()),
    _value("stacked", "layers.0.mlp", lambda tensor: tensor[None]),
    _value("stacked", "norm", lambda tensor: tensor[None]),
    _value("NaN", "layers.0.mlp", lambda tensor: tensor.clone().fill_(float("nan"))),
    _value("infinite", "norm", lambda tensor: tensor.clone().fill_(float("inf"))),
    _value("zero", "norm", torch.zeros_like),
    _value("integers", "norm", lambda tensor: tensor.to(torch.int32)),
    _value("integers", "layers.0.mlp", lambda tensor: tensor.to(torch.int8)),
    _value("8 bits", "layers.1.mlp", lambda tensor: tensor.to(torch.float8_e4m3fn)),
    _lost("layers.1.mlp"),
    _lost("layers.1."),
    _lost("norm"),
    _lost("bias"),
    _dtype(torch.bfloat16),
    _dtype(torch.float16),
    _dtype(torch.float64, harmless=False),
    _dtype(torch.bfloat16, "mlp"),
    _dtype(torch.float16, "norm"),
    _dtype(torch.bfloat16, "embed"),
    _dtype(torch.float64, "norm", harmless=False),
)  # fmt: skip


def _shards(number: int) -> Callable[[Form], None]:
    def change(form: Form) -> None:
        form.num_shards = number

    return change


def _index(name: str, change: Callable[[dict[str, Any]], object], spelling: bool = False) -> Fault:
    """Change the index of a checkpoint in three shards."""

    def at_end(directory: Path) -> None:
        document = json.loads((directory / INDEX).read_text())
        change(document)
        (directory / INDEX).write_text(json.dumps(document))

    def sharded(form: Form) -> None:
        form.num_shards = 3
        form.at_end.append(at_end)

    return Fault(f"shards: {name}", sharded, place="shards", is_spelling=spelling)


def _at_end(name: str, change: Callable[[Path], object], shards: int = 1, harmless: bool = False) -> Fault:
    def changed(form: Form) -> None:
        form.num_shards = shards
        form.at_end.append(change)

    return Fault(f"shards: {name}", changed, place="shards", is_harmless=harmless)


def _shard(directory: Path) -> Path:
    return min(directory.glob("model*.safetensors"))


def _cut(directory: Path) -> None:
    path = _shard(directory)
    path.write_bytes(path.read_bytes()[:-64])


def _single_beside(directory: Path) -> None:
    """Leave the single file of another save, whose values are others, beside shards."""
    tensors: dict[str, Tensor] = {}
    for path in directory.glob("model-*.safetensors"):
        tensors |= load_file(path)
    # Norms are stored whole, so that the difference stays exact.
    others = {name: tensor * 2 if tensor.dim() == 1 else tensor for name, tensor in tensors.items()}
    save_file(others, directory / SINGLE, {"format": "pt"})


def _one_twice(directory: Path) -> None:
    """Put a tensor of the last shard into the first one, too, with other values."""
    paths = sorted(directory.glob("model-*.safetensors"))
    name, tensor = next(iter(load_file(paths[-1]).items()))
    save_file({**load_file(paths[0]), name: tensor * 2}, paths[0], {"format": "pt"})


def _linked(directory: Path) -> None:
    (directory / "blobs").mkdir()
    for path in directory.glob("model*.safetensors"):
        target = directory / "blobs" / path.stem
        path.rename(target)
        path.symlink_to(target)


def _without_metadata(directory: Path) -> None:
    path = _shard(directory)
    save_file(load_file(path), path)


SHARDS = (
    Fault("shards: 3", _shards(3), place="shards", is_harmless=True),
    _index("no metadata", lambda index: index.pop("metadata"), spelling=True),
    _index("more names", lambda index: index["weight_map"].update(more="model-00001-of-00003.safetensors")),
    _index("a name less", lambda index: index["weight_map"].pop(min(index["weight_map"]))),
    _index("an absent shard", lambda index: index["weight_map"].update(more="model-00004-of-00003.safetensors")),
    _index(
        "names in the wrong shards",
        lambda index: index.update(
            weight_map=dict.fromkeys(index["weight_map"], "model-00001-of-00003.safetensors")
        ),
    ),
    _index("no map", lambda index: index.pop("weight_map")),
    _index("total size", lambda index: index["metadata"].update(total_size=3)),
    _at_end("cut", _cut),
    _at_end("cut of three", _cut, 3),
    _at_end("a single file beside", _single_beside, 3),
    _at_end("one tensor twice", _one_twice, 3),
    _at_end("links", _linked, harmless=True),
    _at_end("links to three", _linked, 3, harmless=True),
    _at_end("no format", _without_metadata),
    _at_end("a shard is gone", lambda directory: _shard(directory).unlink(), 3),
    _at_end("a pointer of Git", lambda directory: _shard(directory).write_text(
        "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 3\n")),
    _at_end("an index beside", lambda directory: (directory / INDEX).write_text('{"weight_map": {}}')),
    _at_end("a pickle beside", lambda directory: (directory / "pytorch_model.bin").write_bytes(b"x"), harmless=True),
    _at_end("a pickle alone", lambda directory: _shard(directory).rename(directory / "pytorch_model.bin")),
)  # fmt: skip
FAULTS: Mapping[str, tuple[Fault, ...]] = {
    "config": CONFIGS, "ends": ENDS_FAULTS, "files": FILES, "names": NAMES, "shards": SHARDS,
}  # fmt: skip


def applied(form: Form, faults: list[Fault], *, spelled: bool = True) -> Form:
    """Return a changed copy of a form; without `spelled`, spellings are left out."""
    changed = form.copy()
    for fault in sorted(faults, key=_order):
        if spelled or not fault.is_spelling:
            fault.change(changed)
    return changed


# Names are those of transformers until one spells them otherwise.
ORDER = ("ends", "rows", "config", "file", "generation", "more", "values", "lost", "dtype", "names", "shards")


def _order(fault: Fault) -> tuple[int, str]:
    return ORDER.index(fault.name.split(":")[0]), fault.name
