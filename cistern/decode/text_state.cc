#include "cistern/decode/text_state.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "cistern/base/error.h"
#include "cistern/base/hash.h"
#include "cistern/models/model_state_file.h"

namespace cistern {

void TokenHistory::Push(int32_t token) {
  ever.at(size_t(token)) = true;
  recent.push_back(token);
  if (int64_t(recent.size()) > kRecent) recent.pop_front();
}

int64_t TextState::position(int64_t row) const { return model.positions[row].item<int64_t>(); }

int64_t TextState::Bytes() const { return model.Bytes(); }

TextState TextState::Clone() const {
  return {model.Clone(), hidden.defined() ? hidden.clone() : hidden, drawn, history};
}

TextState TextState::Reorder(const std::vector<int64_t>& order) const {
  TextState out;
  const at::Tensor index = at::tensor(order, at::kLong).to(model.positions.device());
  out.model = model.Reorder(index);
  if (hidden.defined()) out.hidden = hidden.index_select(0, index);
  for (const int64_t row : order) {
    out.drawn.push_back(drawn.at(size_t(row)));
    out.history.push_back(history.at(size_t(row)));
  }
  return out;
}

TextState EmptyTextState(const LanguageModel& model, int64_t rows) {
  TextState text;
  text.model = model.EmptyState(rows);
  text.drawn.assign(size_t(rows), 0);
  text.history.assign(size_t(rows), {std::vector<bool>(size_t(model.config().vocab_size)), {}});
  return text;
}

void SaveTextState(const std::string& path, const LanguageModel& model, const Tokenizer& tokenizer,
                   const TextState& text) {
  CISTERN_CHECK(text.hidden.defined(),
                "[text_state] nothing has been read yet, so there is nothing to save in ", path);
  const int64_t rows = text.rows(), vocab = model.config().vocab_size;
  size_t longest = 0;
  for (const TokenHistory& h : text.history) longest = std::max(longest, h.recent.size());
  const at::Tensor ever = at::zeros({rows, vocab}, at::kBool),
                   recent = at::full({rows, int64_t(longest)}, -1, at::kInt);
  for (int64_t b = 0; b < rows; ++b) {
    const TokenHistory& h = text.history[size_t(b)];
    std::copy(h.ever.begin(), h.ever.end(), ever.mutable_data_ptr<bool>() + b * vocab);
    std::copy(
        h.recent.begin(), h.recent.end(),
        recent.mutable_data_ptr<int32_t>() + (b + 1) * int64_t(longest) - int64_t(h.recent.size()));
  }
  SaveModelState(path, model,
                 {text.model,
                  {{"text.hidden", text.hidden},
                   {"text.drawn", at::tensor(text.drawn, at::kLong)},
                   {"text.ever", ever},
                   {"text.recent", recent}},
                  {{"tokenizer", HexText(tokenizer.Hash())}}});
}

TextState LoadTextState(const std::string& path, const LanguageModel& model,
                        const Tokenizer& tokenizer) {
  const ModelStateFile file =
      LoadModelState(path, model, {{"tokenizer", HexText(tokenizer.Hash())}});
  const int64_t rows = file.state.positions.size(0), vocab = model.config().vocab_size;
  const auto take = [&](const std::string& name, at::ScalarType type, std::vector<int64_t> shape) {
    for (const NamedTensor& t : file.extra) {
      if (t.name != name) continue;
      if (shape.back() < 0 && t.value.dim() > 0) shape.back() = t.value.size(-1);
      CISTERN_CHECK(t.value.scalar_type() == type && t.value.sizes() == shape, path, ": tensor '",
                    name, "' has shape ", t.value.sizes(), " of type ",
                    at::toString(t.value.scalar_type()), ", expected ", at::IntArrayRef(shape),
                    " of type ", at::toString(type));
      return t.value;
    }
    Fail(path, ": tensor '", name,
         "' is missing; the file holds a model's state, but not a text that can be continued");
  };
  TextState text = EmptyTextState(model, rows);
  text.model = file.state;
  text.hidden = take("text.hidden", at::typeMetaToScalarType(model.options().dtype()),
                     {rows, 1, model.config().Stack(Form::kCausal).dim()})
                    .to(model.options());
  const at::Tensor drawn = take("text.drawn", at::kLong, {rows}),
                   ever = take("text.ever", at::kBool, {rows, vocab}),
                   recent = take("text.recent", at::kInt, {rows, -1});
  const int64_t longest = recent.size(1);
  for (int64_t b = 0; b < rows; ++b) {
    TokenHistory& h = text.history[size_t(b)];
    text.drawn[size_t(b)] = drawn.const_data_ptr<int64_t>()[b];
    for (int64_t i = 0; i < vocab; ++i)
      h.ever[size_t(i)] = ever.const_data_ptr<bool>()[b * vocab + i];
    for (int64_t i = 0; i < longest; ++i) {
      const int32_t token = recent.const_data_ptr<int32_t>()[b * longest + i];
      CISTERN_CHECK(token >= -1 && token < vocab, path, ": tensor 'text.recent' holds token ",
                    token, ", the vocabulary has ", vocab);
      if (token >= 0) h.recent.push_back(token);
    }
    CISTERN_CHECK(text.drawn[size_t(b)] >= 0, path, ": tensor 'text.drawn' holds a number below 0");
  }
  return text;
}

}  // namespace cistern
