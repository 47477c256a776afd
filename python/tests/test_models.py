"""cistern.load: the C++ program's model folders, read and written, with the same logits."""

import json
import math
import warnings

import cistern
import numpy
import pytest
import torch
from cistern.models import KINDS
from conftest import error, forms
from safetensors.torch import save_file


def write_folder(folder, model, **config):
    """A model folder from Python: the C++ library reads it below."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(model.state_dict(), folder / "model.safetensors")
    return folder


def make_config(**more):
    config = dict(kind="decoder_lm", vocab_size=19, dim=16, layers=2, heads=2, max_length=32)
    return config | more


def check(folder, config, lengths=None):
    made = KINDS[config["kind"]](config)
    for p in made.parameters():
        torch.nn.init.normal_(p, std=0.3)
    write_folder(folder, made, **config)
    ids = torch.randint(config["vocab_size"], (2, 12))
    expected = torch.ops.cistern.folder_logits(str(folder), ids, lengths)
    model = cistern.load(folder)
    with torch.no_grad():
        logits = model(ids, lengths=lengths)
    real = slice(None) if lengths is None or logits.dim() == 2 else torch.arange(
        12) < lengths.unsqueeze(1)
    assert float(
        (logits - expected)[real].abs().max()) < 1e-5 * max(1.0, float(expected[real].abs().max()))
    return model, ids, logits


@pytest.mark.parametrize("name", [p.values[0] for p in forms() if p.values[2] == "causal"])
def test_language_model(tmp_path, name):
    options = cistern.mechanisms()[name]["cases"][0]
    model, ids, logits = check(
        tmp_path / "m", make_config(attention=[name], attention_options={name: options}, conv=3))
    with torch.no_grad():
        a, state = model.extend(ids[:, :5])
        b, _ = model.extend(ids[:, 5:], state)
    assert error(torch.cat([a, b], 1), logits) < 1e-5


@pytest.mark.parametrize(
    "more",
    [
        dict(attention=["softmax"], positions="rotary", norm="post", bias=True),
        dict(attention=["latte", "window"], positions="learned", activation="relu",
             tie_embeddings=False, head_bias=True),
        dict(attention=["window:1+latte:1"], positions="sinusoidal", activation="gelu_tanh",
             ffn_bias=True, final_norm=False),
        dict(attention=["abc_mlp"], attention_options={"abc_mlp": {"tied": True, "slots": 4}}),
        dict(attention=["linformer"],
             attention_options={"linformer": {"sharing": "layerwise", "slots": 4}}),
        dict(attention=["latte", "softmax", "latte"], layers=3, tied_layers=[0, 1, 0],
             embedding_norm=True, ffn_dropout=0.5),
        dict(attention=["softmax"], attention_options={"softmax": {"scale": "unit"}}, qkv_dim=12,
             norm_kind="rms", positions="relative", scale_embeddings=True, scale_logits=True,
             activation="geglu"),
        dict(attention=["latte"], qkv_dim=24, positions="sinusoidal_halves"),
        dict(attention=["latte"], scale_embeddings=True,
             decoder_lm=dict(embedding="adaptive", cutoffs=[5, 9])),
        dict(attention=["latte"], tie_embeddings=False, bias=True, layers=1,
             decoder_lm=dict(embedding="adaptive", cutoffs=[5, 9], embedding_factor=2,
                             tie_projections=False)),
    ],
    ids=lambda more: more["attention"][0] + "-" + str(len(more)),
)
def test_what_configs_can_ask_for(tmp_path, more):
    check(tmp_path / "m", make_config(**more))
    check(tmp_path / "m", make_config(**more), lengths=torch.tensor([12, 7]))


@pytest.mark.parametrize("pooling", ["mean", "cls"])
@pytest.mark.parametrize("name", ["latte", "softmax", "abc_cluster"])
def test_classifier(tmp_path, name, pooling):
    config = make_config(kind="encoder_classifier", classes=3, attention=[name], pooling=pooling,
                         positions="learned")
    check(tmp_path / "m", config)
    check(tmp_path / "m", config, lengths=torch.tensor([12, 7]))


@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_classifier_of_values(tmp_path, pooling):
    config = make_config(kind="encoder_classifier", classes=3, vocab_size=0, pooling=pooling,
                         positions="learned",
                         encoder_classifier=dict(input="values", channels=5))
    made = KINDS[config["kind"]](config)
    write_folder(tmp_path / "m", made, **config)
    values, lengths = torch.randn(2, 12, 5), torch.tensor([12, 7])
    expected = torch.ops.cistern.folder_logits(str(tmp_path / "m"), values, lengths)
    with torch.no_grad():
        assert error(cistern.load(tmp_path / "m")(values, lengths), expected) < 1e-5


@pytest.mark.parametrize("residual", [True, False])
def test_forecaster(tmp_path, residual):
    config = make_config(kind="forecaster", vocab_size=0, attention=["latte"],
                         forecaster=dict(inputs=4, outputs=3, residual=residual))
    made = KINDS[config["kind"]](config)
    write_folder(tmp_path / "m", made, **config)
    values, lengths = torch.randn(2, 12, 4), torch.tensor([12, 7])
    expected = torch.ops.cistern.folder_logits(str(tmp_path / "m"), values, lengths)
    model = cistern.load(tmp_path / "m")
    with torch.no_grad():
        y = model(values, lengths=lengths)
        a, state = model.extend(values[:, :5])
        b, _ = model.extend(values[:, 5:], state)
    assert error(y[0], expected[0]) < 1e-5 and error(y[1, :7], expected[1, :7]) < 1e-5
    assert error(torch.cat([a, b], 1)[0], y[0]) < 1e-5


@pytest.mark.parametrize("match", ["lra", "nli", "conv_luna", "latte", "luna", "nystrom"])
def test_two_tower(tmp_path, match):
    config = make_config(kind="two_tower", classes=2, attention=["latte"], positions="sinusoidal",
                         two_tower=dict(match=match))
    made = KINDS[config["kind"]](config)
    for p in made.parameters():
        torch.nn.init.normal_(p, std=0.3)
    write_folder(tmp_path / "m", made, **config)
    ids, second, lengths = torch.randint(19, (2, 12)), torch.randint(19, (2, 9)), torch.tensor(
        [12, 7])
    expected = torch.ops.cistern.folder_logits(str(tmp_path / "m"), ids, lengths, second)
    with torch.no_grad():
        assert error(cistern.load(tmp_path / "m")(ids, second, lengths), expected) < 1e-5


@pytest.mark.parametrize(
    "more",
    [
        dict(padding="seen"),
        dict(padding="zeros", pooling="cls", cls_place="after", scale_embeddings=True),
        dict(pooling="mean_all", head="tanh"),
        dict(pooling="mean_zeros", head="gelu", head_dims=[5, 4], head_dropout=0.5),
        dict(pooling="first", qkv_dim=8, norm_kind="rms"),
        dict(attention=["perceiver", "softmax"],
             attention_options={"perceiver": {"latents": 3, "heads": 1, "head_dim": 5}}),
        dict(attention=["perceiver", "softmax"],
             attention_options={"perceiver": {"latents": 3, "queries": "latents"}}),
        dict(attention=["perceiver", "softmax"],
             attention_options={"perceiver": {"latents": 3, "fourier_bands": 2}}),
        dict(attention=["conv_luna"], pooling="memory",
             attention_options={"conv_luna": {"slots": 3, "mask": "none"}}),
    ],
    ids=lambda more: "-".join(more),
)
def test_parts_of_published_classifiers(tmp_path, more):
    config = make_config(kind="encoder_classifier", classes=3, positions="learned",
                         **{"attention": ["softmax"], **more})
    check(tmp_path / "m", config)
    check(tmp_path / "m", config, lengths=torch.tensor([12, 7]))


@pytest.mark.parametrize("place", ["before", "after"])
def test_given_positions_are_those_of_the_tokens(tmp_path, place):
    config = make_config(kind="encoder_classifier", classes=3, positions="learned",
                         attention=["softmax"], pooling="cls", cls_place=place)
    model, _, _ = check(tmp_path / "m", config)
    ids, at, first = torch.tensor([[1, 2, 3]]), torch.tensor([[2, 4, 9]]), int(place == "before")
    with torch.no_grad():
        assert error(model(ids, positions=torch.arange(3).unsqueeze(0)), model(ids)) < 1e-6
        got, other = model(ids, positions=at), model(ids, positions=at - torch.tensor([0, 0, 1]))
        assert error(got, other) > 1e-4
        table = model.embed_positions.weight
        table[first:first + 3] = table[at[0] + first].clone()
        assert error(got, model(ids)) < 1e-6


def test_relative_positions_take_no_others(tmp_path):
    config = make_config(kind="encoder_classifier", classes=3, positions="relative",
                         attention=["softmax"])
    model, ids, _ = check(tmp_path / "m", config)
    with pytest.raises(cistern.UsageError, match="positions=relative"):
        model(ids, positions=torch.arange(ids.shape[1]).expand_as(ids))


@pytest.mark.parametrize(
    "more",
    [dict(), dict(head_bias=True),
     dict(tie_embeddings=False, head_bias=True, masked_lm=dict(transform=False))],
    ids=["", "bias", "plain"])
@pytest.mark.parametrize("name", ["latte", "softmax", "luna"])
def test_masked_language_model(tmp_path, name, more):
    model, ids, logits = check(
        tmp_path / "m",
        make_config(kind="masked_lm", attention=[name], positions="sinusoidal", **more))
    ids[0, 3] = model.mask_id
    expected = torch.ops.cistern.folder_logits(str(tmp_path / "m"), ids, None)
    with torch.no_grad():
        hidden = model(ids)
    assert error(hidden, expected) < 1e-5
    assert error(hidden, logits) > 1e-3
    check(tmp_path / "m",
          make_config(kind="masked_lm", attention=[name], positions="learned", **more),
          lengths=torch.tensor([12, 7]))


@pytest.mark.parametrize("name", ["latte", "softmax", "luna"])
def test_span_predictor(tmp_path, name):
    config = make_config(kind="span_predictor", attention=[name], positions="learned")
    _, _, logits = check(tmp_path / "m", config)
    assert logits.shape[-1] == 2
    check(tmp_path / "m", config, lengths=torch.tensor([12, 7]))


@pytest.mark.parametrize("name", ["latte", "abc_mlp", "rfa", "softmax", "window"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_trains_a_step_without_data(tmp_path, kind, name):
    """On `meta` a tensor made on another device, or read by the CPU, is an error."""
    more = dict(classes=3) if kind in ("encoder_classifier", "two_tower") else {}
    if kind == "encoder_decoder":
        more["cross"] = dict(attention=["latte"])
        more["encoder"] = dict(attention=["latte"])
    if kind == "forecaster":
        more["forecaster"] = dict(inputs=4, outputs=3)
    config = make_config(kind=kind, attention=[name], positions="sinusoidal", **more)
    model = KINDS[kind](config).to("meta")
    ids = torch.zeros(2, 12, dtype=torch.int64, device="meta")
    if kind == "forecaster":
        ids = torch.zeros(2, 12, 4, device="meta")
    logits = model(*([ids, ids] if kind in ("encoder_decoder", "two_tower") else [ids]))
    logits.logsumexp(-1).mean().backward()
    for key, p in model.named_parameters():
        if key != "mask_token" or kind != "masked_lm":
            assert p.grad is not None and p.grad.is_meta, key
    torch.optim.AdamW(model.parameters()).step()


@pytest.mark.parametrize("kind", KINDS)
def test_first_weights_are_drawn_as_the_config_says(kind):
    more = dict(vocab_size=60, embedding_std=0.1)
    if kind in ("encoder_classifier", "two_tower"):
        more["classes"] = 3
    if kind == "forecaster":
        more = dict(vocab_size=0, forecaster=dict(inputs=4, outputs=3))
    config = make_config(kind=kind, dim=32, positions="learned", init_std=0.05, position_std=0.3,
                         init=dict(value="normal(0.7)", ffn_up="xavier_uniform(2)"), **more)
    weights = KINDS[kind](config).state_dict()
    wanted = {"embed_tokens.weight": 0.1, "embed_positions.weight": 0.3,
              "attention.q_proj.weight": 0.05, "attention.v_proj.weight": 0.7,
              "ffn.up_proj.weight": 2 * (2 / (32 + 128))**0.5,
              "layers.1.ffn.down_proj.weight": 0.05 / 2}  # by sqrt(2 layers)
    if kind == "forecaster":
        del wanted["embed_tokens.weight"]
    if kind == "encoder_decoder":
        wanted["decoder.layers.1.ffn.down_proj.weight"] = 0.05 / 6**0.5
        wanted["encoder.layers.1.ffn.down_proj.weight"] = wanted.pop(
            "layers.1.ffn.down_proj.weight")
    for end, std in wanted.items():
        found = [float(w.std()) for name, w in weights.items() if name.endswith(end)]
        assert found and all(abs(s / std - 1) < 0.15 for s in found), end
    torch.manual_seed(3)
    first = KINDS[kind](config).state_dict()
    torch.manual_seed(3)
    again = KINDS[kind](config).state_dict()
    other = KINDS[kind](config).state_dict()
    assert all(torch.equal(first[name], again[name]) for name in first)
    name = "layers.0.ffn.up_proj.weight"
    name = name if name in first else "decoder." + name
    assert not torch.equal(first[name], other[name])


def test_a_new_model_expects_any_token():
    model = cistern.DecoderLM(dict(vocab_size=500, dim=32, attention=["latte"]))
    ids = torch.randint(500, (4, 20))
    with torch.no_grad():
        logits = model(ids)
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    assert abs(float(loss) - math.log(500)) < 0.05
    assert model.config["norm_eps"] == 1e-5  # with all keys
    with pytest.raises(cistern.UsageError, match="of kind decoder_lm, got one of masked_lm"):
        cistern.DecoderLM(dict(kind="masked_lm", vocab_size=500))
    with pytest.raises(cistern.UsageError, match="did you mean 'layers'"):
        cistern.DecoderLM(dict(vocab_size=500, layer=2))
    with pytest.raises(cistern.UsageError, match="init.bias=width_normal does not fit"):
        cistern.DecoderLM(dict(vocab_size=500, bias=True, init=dict(bias="width_normal")))
    with torch.device("meta"):
        assert all(p.is_meta for p in cistern.DecoderLM(dict(vocab_size=500)).parameters())


def test_every_kind_has_a_module():
    assert set(KINDS) == set(json.loads(torch.ops.cistern.models()))


TRANSLATORS = [
    dict(),
    dict(attention=["latte"], cross=dict(attention=["latte"]), positions="learned", norm="post",
         bias=True, conv=3),
    dict(encoder=dict(dim=8, layers=1), decoder=dict(attention=["softmax"]),
         encoder_decoder=dict(share_embeddings=False), positions="sinusoidal"),
    dict(cross=dict(attention=["abc_mlp"], attention_options=dict(abc_mlp=dict(slots=7))),
         decoder=dict(attention=["abc_mlp"]), tie_embeddings=False),
    dict(attention=["softmax"], cross=dict(attention=["reuse"]),
         attention_options=dict(reuse=dict(heads=1)), positions="rotary"),
    dict(cross=dict(attention=["luna"]), attention_options=dict(luna=dict(slots=3)),
         embedding_norm=True, target_vocab_size=0),
]


def translator_in(folder, config):
    """Writes a model of random weights; a source and a target for it."""
    made = KINDS["encoder_decoder"](config)
    for p in made.parameters():
        torch.nn.init.normal_(p, std=0.3)
    write_folder(folder, made, **config)
    return torch.randint(19, (2, 9)), torch.randint(19, (2, 7))


@pytest.mark.parametrize("more", TRANSLATORS, ids=range(len(TRANSLATORS)))
@pytest.mark.parametrize("lengths", [None, torch.tensor([9, 4])])
def test_encoder_decoder(tmp_path, more, lengths):
    config = make_config(kind="encoder_decoder", **more)
    source, ids = translator_in(tmp_path / "m", config)
    expected = torch.ops.cistern.folder_logits(str(tmp_path / "m"), ids, lengths, source)
    model = cistern.load(tmp_path / "m")
    with torch.no_grad():
        logits = model(source, ids, source_lengths=lengths)
        state = model.encode(source, lengths)
        a, state = model.extend(ids[:, :3], state)
        b, _ = model.extend(ids[:, 3:], state)
    assert float((logits - expected).abs().max()) < 1e-5 * max(1.0, float(expected.abs().max()))
    assert error(torch.cat([a, b], 1), logits) < 1e-5


CROSS = [p.values[:2] for p in forms() if p.values[2] == "cross" and p.values[0] != "reuse"]
CROSS.append(("abc_random:1+latte:1", {}))


@pytest.mark.parametrize("name, options", CROSS)
def test_every_cross_attention(tmp_path, name, options):
    config = make_config(kind="encoder_decoder",
                         cross=dict(attention=[name], attention_options={name: options}))
    source, ids = translator_in(tmp_path / "m", config)
    expected = torch.ops.cistern.folder_logits(str(tmp_path / "m"), ids, None, source)
    with torch.no_grad():
        assert error(cistern.load(tmp_path / "m")(source, ids), expected) < 1e-5


STREAMS = [
    (name, i, norm)
    for name, info in cistern.mechanisms().items()
    if info["memory"] != "none" and "bidirectional" in info["forms"]
    for i in range(len(info["cases"]))
    for norm in (["pre", "post"] if i == 0 else ["pre"])
]


@pytest.mark.parametrize("name, case, norm", STREAMS)
def test_classifier_with_a_memory(tmp_path, name, case, norm):
    """Handed from block to block with residual and norm, pooled where it is, in every case that the
    mechanism declares."""
    info = cistern.mechanisms()[name]
    config = make_config(
        kind="encoder_classifier",
        classes=3,
        layers=3,
        attention=[name],
        attention_options={name: info["cases"][case]},
        positions="learned",
        norm=norm,
        bias=case % 2 == 1,
        head=["relu", "gelu", "linear"][case % 3],
        norm_pooled=case % 2 == 0,
        embedding_norm=case % 2 == 1,
    )
    for pooling in ("mean", "memory") if info["memory"] in ("stream", "replaced") else ("mean",):
        for lengths in (None, torch.tensor([12, 7])):
            check(tmp_path / "m", config | dict(pooling=pooling), lengths)


@pytest.mark.parametrize("name", ["luna", "perceiver"])
def test_tied_layers_and_a_norm_after_the_embedding(tmp_path, name):
    config = make_config(kind="encoder_classifier", classes=3, layers=3, attention=[name],
                         tied_layers=[0, 0, 0], embedding_norm=True)
    model, _, _ = check(tmp_path / "m", config, lengths=torch.tensor([12, 7]))
    assert not any(key.startswith("layers.1") for key in model.state_dict())


@pytest.mark.parametrize(
    "attention",
    [
        "luna latte luna", "perceiver luna perceiver", "set_transformer conv_luna softmax",
        "softmax shared_workspace", "latte perceiver"
    ],
)
@pytest.mark.parametrize("norm", ["pre", "post"])
def test_mixed_streams(tmp_path, attention, norm):
    names = attention.split()
    config = make_config(kind="encoder_classifier", classes=3, layers=len(names), attention=names,
                         norm=norm)
    check(tmp_path / "m", config, lengths=torch.tensor([12, 7]))
    if "latte luna" in attention:
        check(tmp_path / "m", config | dict(pooling="cls"), lengths=torch.tensor([12, 7]))
        check(
            tmp_path / "m", config
            | dict(tied_layers=[0, 1, 0], attention_options={"luna": {"slots": 3, "norm": True}}))


REUSE = [
    dict(heads=1),
    dict(heads=-1, placement="partial", keep="scores"),
    dict(heads=1, placement="partial"),
    dict(heads=-1, placement="full"),
    dict(heads=1, placement="all_end", layers=1),
    dict(heads=-1, placement="skip", layers=2),
]


@pytest.mark.parametrize("options", REUSE, ids=lambda o: "-".join(str(v) for v in o.values()))
@pytest.mark.parametrize("kind", ["decoder_lm", "encoder_classifier"])
def test_reuse(tmp_path, options, kind):
    config = make_config(kind=kind, layers=4, attention=["reuse"],
                         attention_options={"reuse": options}, positions="rotary")
    if kind == "encoder_classifier":
        check(tmp_path / "m", config | dict(classes=3))
        check(tmp_path / "m", config | dict(classes=3), lengths=torch.tensor([12, 7]))
        return
    model, ids, logits = check(tmp_path / "m", config | dict(conv=3))
    with torch.no_grad():
        a, state = model.extend(ids[:, :5])
        b, _ = model.extend(ids[:, 5:], state)
    assert error(torch.cat([a, b], 1), logits) < 1e-5
    check(tmp_path / "m",
          config | dict(norm="post", attention=["softmax", "reuse", "reuse", "reuse"]),
          lengths=torch.tensor([12, 7]))


def test_models_compile_and_train(tmp_path):
    """Gradients of a loaded classifier reach its memory, compiled as eager."""
    more = dict(attention=["luna"], attention_options={"luna": {"slots": 3, "init": "scaled"}},
                pooling="memory", layers=3)
    model, ids, _ = check(tmp_path / "m", make_config(kind="encoder_classifier", classes=3, **more))
    grads = []
    for run in (model, torch.compile(model, fullgraph=True, backend="aot_eager")):
        model.zero_grad()
        run(ids, torch.tensor([12, 7])).square().sum().backward()
        grads.append({name: p.grad.clone() for name, p in model.named_parameters()})
    assert grads[0]["layers.0.attention.core.memory"].abs().sum() > 0
    largest = max(grad.norm() for grad in grads[0].values())  # others may be rounding alone
    for name, grad in grads[0].items():
        assert (grads[1][name] - grad).norm() < 1e-4 * max(grad.norm(), 1e-3 * largest), name


def test_files_that_are_broken(tmp_path):
    check(tmp_path / "m", make_config(attention=["latte"]))
    file = tmp_path / "m" / "model.safetensors"
    whole = file.read_bytes()
    for broken in (whole[:100], b"", b"\xff" * 64):
        file.write_bytes(broken)
        with pytest.raises(RuntimeError, match="m/model.safetensors"):
            cistern.load(tmp_path / "m")
    save_file({"other": torch.zeros(2)}, file)
    with pytest.raises(cistern.UsageError,
                       match=r"(?s)m/model.safetensors.*embed_tokens.weight.*other"):
        cistern.load(tmp_path / "m")
    file.unlink()
    with pytest.raises(RuntimeError, match="m/model.safetensors"):
        cistern.load(tmp_path / "m")


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool])
def test_weights_that_are_no_real_numbers(tmp_path, dtype):
    model, _, _ = check(tmp_path / "m", make_config(attention=["latte"]))
    weights = model.state_dict()
    for changed in (["norm.weight"], list(weights)):
        bad = {n: w.to(dtype) if n in changed else w for n, w in weights.items()}
        save_file(bad, tmp_path / "m" / "model.safetensors")
        with pytest.raises(cistern.UsageError,
                           match=rf"m/model.safetensors: tensor '.*weight' has type {dtype}"):
            cistern.load(tmp_path / "m")


def test_a_config_that_the_weights_were_not_saved_with(tmp_path):
    folder = tmp_path / "m"
    config = make_config(attention=["latte"])
    model, _, _ = check(folder, config)
    # XXH64 of {"attention":["latte"],...}, its keys in order, as the program writes it.
    saved = {"config.json": "7ab3b91fdffd2bf5"}
    save_file(model.state_dict(), folder / "model.safetensors", metadata=saved)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cistern.load(folder)
    (folder / "config.json").write_text(json.dumps(config | {"max_length": 31}))
    with pytest.warns(UserWarning, match="m/config.json is not the one that .*m/model.safetensors"):
        cistern.load(folder)


def test_refusals(tmp_path):
    config = make_config(attention=["late"])
    with pytest.raises(cistern.UsageError, match="config.json.*did you mean 'latte'"):
        write_folder(tmp_path / "m", torch.nn.Linear(1, 1), **config)
        cistern.load(tmp_path / "m")
    (tmp_path / "m" / "config.json").write_text("{")
    with pytest.raises(RuntimeError, match="config.json:1"):
        cistern.load(tmp_path / "m")


# As earlier versions wrote them, whose maps had other biases than today's defaults.
@pytest.mark.parametrize("name, option, value, bias", [("rfa_gate", "gate_bias", False, False),
                                                       ("abc_mlp", "control_bias", "model", True)])
def test_biases_of_folders_that_do_not_name_them(tmp_path, name, option, value, bias):
    config = make_config(attention=[name], bias=bias)
    folder = tmp_path / "m"
    made = cistern.DecoderLM(config | {"attention_options": {name: {option: value}}})
    for p in made.parameters():
        torch.nn.init.normal_(p, std=0.3)
    write_folder(folder, made, **config)
    model, ids = cistern.load(folder), torch.randint(19, (2, 12))
    with torch.no_grad():
        assert torch.equal(model(ids), made.eval()(ids))
        assert error(model(ids), torch.ops.cistern.folder_logits(str(folder), ids)) < 1e-5
    assert model.config["attention_options"][name][option] == value


def test_values_of_numpy_in_configs():
    config = make_config(attention=("latte", ), dim=numpy.int64(16), dropout=numpy.float32(0.5),
                         attention_options={"latte": {"latents": numpy.int64(4)}})
    model = cistern.DecoderLM(config)
    assert (model.config["dim"], model.config["dropout"]) == (16, 0.5)
    assert model.config["attention_options"] == {"latte": {"latents": 4}}
    for bad in torch.tensor(16), object(), math.nan:
        with pytest.raises(cistern.UsageError, match="config: expected a .* for dim, got"):
            cistern.DecoderLM(make_config(dim=bad))
    with pytest.raises(cistern.UsageError, match="expected a config, .*'folder'; cistern.load"):
        cistern.DecoderLM("folder")


def test_a_state_of_another_kind():
    model = cistern.DecoderLM(make_config(attention=["latte"]))
    for bad in {"memory": torch.zeros(1)}, [torch.zeros(1)]:
        with pytest.raises(cistern.UsageError, match="expected a state, a dict of layers"):
            model.extend(torch.zeros(1, 2, dtype=torch.int64), bad)


def test_ids_outside_of_an_adaptive_vocabulary(tmp_path):
    model, _, _ = check(tmp_path / "m", make_config(
        attention=["latte"], decoder_lm=dict(embedding="adaptive", cutoffs=[5, 9])))
    for outside in (19, -1):
        with pytest.raises(cistern.UsageError, match="outside of the vocabulary of 19"):
            model(torch.tensor([[1, outside]]))


def test_learned_positions_end(tmp_path):
    model, _, _ = check(tmp_path / "m", make_config(positions="learned", attention=["latte"]))
    with pytest.raises(cistern.UsageError, match="max_length=32"):
        model(torch.zeros(1, 33, dtype=torch.int64))


def test_padding_needs_no_learned_positions():
    model = cistern.DecoderLM(make_config(positions="learned", max_length=16)).eval()
    first, second = torch.randint(19, (2, 14)), torch.randint(19, (2, 10))
    with torch.no_grad():
        _, state = model.extend(first, lengths=torch.tensor([14, 1]))
        y, state = model.extend(second, state, lengths=torch.tensor([2, 10]))
        alone = model(torch.cat([first[1:, :1], second[1:]], 1))
    assert state["positions"].tolist() == [16, 11]
    assert error(y[1:], alone[:, 1:]) < 1e-5


@pytest.mark.parametrize("kind", ["forecaster", "encoder_classifier"])
def test_padding_of_values_has_no_part_whatever_it_holds(kind):
    own = dict(inputs=3, outputs=3) if kind == "forecaster" else dict(input="values", channels=3)
    config = dict(kind=kind, vocab_size=0, dim=16, heads=2, layers=1, attention=["latte"])
    config[kind] = own
    if kind == "encoder_classifier":
        config |= dict(classes=3)
    model, values, lengths = KINDS[kind](config), torch.randn(2, 7, 3), torch.tensor([7, 4])
    gradients = []
    for padding in (0.0, math.nan):
        values[1, 4:] = padding
        y = model(values, lengths=lengths)
        loss = y.sum() if y.dim() == 2 else y[0].sum() + y[1, :4].sum()
        gradients.append(torch.autograd.grad(loss, list(model.parameters()), allow_unused=True))
    for a, b in zip(*gradients):
        assert a is None or torch.equal(a, b)


def test_load_heeds_the_default_device_and_leaves_the_generator(tmp_path):
    config = make_config(attention=["luna_causal"])
    write_folder(tmp_path / "m", KINDS["decoder_lm"](config), **config)
    before = torch.get_rng_state()
    cistern.load(tmp_path / "m")
    assert torch.equal(torch.get_rng_state(), before)
    with torch.device("meta"):
        assert {p.device.type for p in cistern.load(tmp_path / "m").parameters()} == {"meta"}
