"""What torch's tools make of modules: quantization, contexts of a device."""

import cistern
import pytest
import torch
from conftest import DIM, HEADS, error, make_core
from torch._subclasses import FakeTensorMode
from torch.ao.quantization import quantize_dynamic

WEIGHTED = ("performer", "rfa", "luna_causal", "abc_cluster", "t2r")


def quantized(module):
    return quantize_dynamic(module.eval(), {torch.nn.Linear})


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("conv", [0, 3])
def test_quantized_layers_go_on(conv):
    layer = cistern.nn.Attention("latte", DIM, HEADS, conv=conv)
    short, x = quantized(layer), torch.randn(2, 9, DIM)
    a, state = short.extend(x[:, :4])
    b, _ = short.extend(x[:, 4:], state)
    assert error(torch.cat([a, b], 1), layer(x)) < 0.1
    assert error(short(x), layer(x)) < 0.1


# Adapters such as LoRA, which have no weight of their own.
def test_layers_with_wrapped_maps_go_on():
    layer = cistern.nn.Attention("latte", DIM, HEADS, conv=3).double()
    layer.o_proj = torch.nn.Sequential(layer.o_proj)
    x = torch.randn(2, 9, DIM, dtype=torch.float64)
    assert error(layer.extend(x)[0], layer(x)) < 1e-9


@pytest.mark.filterwarnings("ignore")
def test_quantized_cross_attention_reads_its_memory():
    layer = cistern.nn.Attention("luna", DIM, HEADS, form="cross", slots=4)
    x, source = torch.randn(2, 5, DIM), torch.randn(2, 9, DIM)
    assert error(quantized(layer)(x, source), layer(x, source)) < 0.1


@pytest.mark.filterwarnings("ignore")
def test_quantized_models_decode():
    sizes = dict(dim=DIM, layers=2, heads=HEADS, max_length=32)
    lm = cistern.DecoderLM({"vocab_size": 19, "attention": ["latte"], **sizes})
    forecaster = cistern.Forecaster({"forecaster": {"inputs": 2, "outputs": 2}, **sizes})
    for model, x in (lm, torch.randint(19, (2, 9))), (forecaster, torch.randn(2, 9, 2)):
        short = quantized(model)
        a, state = short.extend(x[:, :4])
        b, _ = short.extend(x[:, 4:], state)
        assert error(torch.cat([a, b], 1), model(x)) < 0.1


# As torch.compile sees them: the whole pass has no state that grows.
def test_encoders_with_decoders_run_on_shapes_alone():
    with FakeTensorMode():
        model = cistern.EncoderDecoder({"vocab_size": 19, "dim": DIM, "layers": 1, "heads": HEADS})
        source, ids = torch.randint(19, (2, 9)), torch.randint(19, (2, 5))
        assert model(source, ids, source_lengths=torch.tensor([9, 4])).shape == (2, 5, 19)


@pytest.mark.parametrize("name", WEIGHTED)
def test_weights_are_made_where_torch_makes_tensors(name):
    options = cistern.mechanisms()[name]["cases"][0]
    core = make_core(name, options, "causal")
    with torch.device("meta"):
        copy = make_core(name, options, "causal")
    own = copy.state_dict()
    assert own and all(w.is_meta for w in own.values())
    copy.to_empty(device="cpu").load_state_dict(core.state_dict())
    for key, w in copy.state_dict().items():
        assert w.dtype == core.state_dict()[key].dtype and torch.equal(w, core.state_dict()[key])
    with FakeTensorMode():
        fake = make_core(name, options, "causal").state_dict()
    assert all(isinstance(w, torch._subclasses.FakeTensor) for w in fake.values())


def test_a_memory_is_dropped_row_by_row():
    options = {"slots": 4, "dropout": 0.5}
    layer = cistern.nn.Attention("luna", 16, 2, form="bidirectional", options=options)
    memory = layer.core.initial_memory(4)
    assert memory.shape[0] == 4 and not torch.equal(memory[0], memory[1])
    layer.eval()
    assert layer.core.initial_memory(4).shape[0] == 1
