#include "cistern/verify/suite.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <chrono>

#include "cistern/tensors/torch_error.h"
#include "cistern/verify/properties.h"

namespace cistern::verify {

bool Settings::Has(Form form) const {
  return std::find(forms.begin(), forms.end(), form) != forms.end();
}

std::vector<int64_t> Settings::Lengths() const {
  if (!lengths.empty()) return lengths;
  if (full) return {0, 1, 2, 17, 37, 63, 64, 65, 130, 1000};
  return {1, 2, 17, 63, 64, 65};
}

bool Property::Runs(ops::Impl impl, const Settings& settings) const {
  if (scope == Scope::kDevice || !settings.device.is_cpu())
    return scope == Scope::kDevice && !settings.device.is_cpu() && impl == ops::Impl::kKernel;
  if (impl == ops::Impl::kKernel || scope == Scope::kNumbers) return true;
  return scope == Scope::kForms &&
         (settings.full || impl == ops::Impl::kComposite || settings.implementations.size() == 1);
}

const std::vector<Property>& Properties() {
  static const std::vector<Property> all = {
      {"definition", "every form equals its definition, in double", CheckDefinition,
       Property::Scope::kNumbers},
      {"float", "every form in float equals its definition", CheckFloat, Property::Scope::kNumbers},
      {"one-head", "one row with one head equals its definition", CheckOneHead},
      {"extreme", "inputs a thousand times larger give the right result, within their precision",
       CheckExtreme},
      {"empty", "no tokens, no rows, and rows of padding alone give zeros and no gradient",
       CheckEmpty},
      {"prefix", "causal output t is the last row of the bidirectional form of tokens 0 to t",
       CheckPrefix, Property::Scope::kForms, true},
      {"pieces",
       "the whole sequence = any two pieces = token by token; written in pieces = written at once",
       CheckPieces},
      {"piece-grad", "the same for the gradients, which pass through the state",
       CheckPieceGradients},
      {"future", "no change of later tokens changes earlier outputs (our kernels: not one bit)",
       CheckFuture},
      {"gradient",
       "gradients equal finite differences: of inputs, parameters and the state, padded and packed",
       CheckGradient, Property::Scope::kNumbers},
      {"padding", "padding changes nothing, reads as zero and has exactly zero gradient",
       CheckPadding, Property::Scope::kForms, false, true},
      {"masked",
       "masked tokens (padding on the left, holes) are as if they were not there: they change "
       "nothing, read as zero and have exactly zero gradient",
       CheckMasked, Property::Scope::kForms, false, true},
      {"resume", "rows of different lengths each continue where they stopped", CheckResume},
      {"batch", "a row alone = in a batch, whatever the other rows are", CheckBatch,
       Property::Scope::kForms, false, true},
      {"packed", "documents packed in a row = each alone, also gradients", CheckPacked,
       Property::Scope::kForms, false, true},
      {"nonfinite",
       "NaN and infinities in padding, in later tokens, in other rows and documents are not seen; "
       "in a token itself they are",
       CheckNonFinite, Property::Scope::kForms, false, true},
      {"random", "all of this at random shapes, lengths, document starts and cuts", CheckRandom,
       Property::Scope::kNumbers},
      {"state", "states are cloned and reordered, and of the declared size", CheckState},
      {"file", "a state saved to a file and loaded continues with the same bits", CheckFile},
      {"decoding",
       "floats one by one, as text is generated, equal the definition; the state then goes on at "
       "once, settled, from a file and with rows in another order",
       CheckDecoding},
      {"merge", "states of two adjacent pieces merge into the state of the whole", CheckMerge},
      {"truncate", "a state cut back continues as if the rest had never been read", CheckTruncate},
      {"layer", "a layer is its maps, its core and its output map, one after the other",
       CheckLayer},
      {"copying", "scores taken over from the layer before are that layer's", CheckCopying},
      {"declared",
       "what its options declare is so: padding that takes part, rows that change each other, a "
       "source that is written at once, forms left out",
       CheckDeclared, Property::Scope::kForms, true},
      {"threads", "the same for any number of threads (our kernels: the same bits)", CheckThreads,
       Property::Scope::kMachine},
      {"simd", "every instruction set of this machine gives the reference's numbers", CheckSimd,
       Property::Scope::kMachine},
      {"poison", "nothing is read that was not written: uninitialized memory holds NaN",
       CheckPoison, Property::Scope::kMachine},
      {"device", "with --device: the same there as on the CPU, forward and backward, and decoding",
       CheckDevice, Property::Scope::kDevice},
  };
  return all;
}

const Property& FindProperty(const std::string& name) {
  std::vector<std::string> names;
  for (const Property& p : Properties()) {
    if (p.name == name) return p;
    names.push_back(p.name);
  }
  throw UsageError(UnknownName("property", name, names));
}

Outcome RunCheck(const Property& property, Subject& subject, ops::Impl impl,
                 const Settings& settings) {
  const ops::ImplScope scope(impl);
  at::manual_seed(settings.seed);
  Outcome outcome;
  try {
    const std::string depend = property.rows ? subject.RowsDepend() : "";
    if (!depend.empty()) return NotApplicable(depend);
    outcome = property.check(subject, settings);
    if (outcome.kind != Outcome::Kind::kNotApplicable && outcome.comparisons == 0)
      outcome = NotApplicable("it has none of the forms asked for");
  } catch (const std::exception& e) {
    outcome.kind = Outcome::Kind::kFail;
    outcome.reason = FirstLine(e);
  }
  subject.In(at::kDouble);
  return outcome;
}

namespace {

int64_t LongestOf(const Settings& settings) {
  const std::vector<int64_t> lengths = settings.Lengths();
  return std::max<int64_t>(256, *std::max_element(lengths.begin(), lengths.end()));
}

// The settings that a property is run with, one after the other: each form by itself.
std::vector<Settings> EachForm(const MechanismInfo& info, const Property& property,
                               const Settings& settings) {
  if (property.together) return {settings};
  std::vector<Settings> all;
  for (const Form form : settings.forms) {
    if (!info.Supports(form)) continue;
    all.push_back(settings);
    all.back().forms = {form};
  }
  if (all.empty()) all.push_back(settings);  // to say that it has none of them
  return all;
}

}  // namespace

std::vector<Result> RunSuite(const std::vector<const MechanismInfo*>& mechanisms,
                             const std::vector<const Property*>& properties,
                             const Settings& settings,
                             const std::function<bool(const Result&)>& done) {
  std::vector<Result> results;
  for (const MechanismInfo* info : mechanisms) {
    for (const Json& options : info->cases) {
      Subject subject(*info, options, settings.seed, 0, LongestOf(settings));
      for (const Property* property : properties) {
        for (const ops::Impl impl : settings.implementations) {
          if (!property->Runs(impl, settings)) continue;
          for (const Settings& own : EachForm(*info, *property, settings)) {
            const auto begin = std::chrono::steady_clock::now();
            Result result{info->name,
                          options,
                          property->name,
                          impl,
                          RunCheck(*property, subject, impl, own),
                          0,
                          own.forms.size() == 1 ? std::optional(own.forms[0]) : std::nullopt};
            result.seconds =
                std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
            results.push_back(std::move(result));
            if (done && !done(results.back())) return results;
          }
        }
      }
    }
  }
  return results;
}

int64_t CountChecks(const std::vector<const MechanismInfo*>& mechanisms,
                    const std::vector<const Property*>& properties, const Settings& settings) {
  int64_t count = 0;
  for (const MechanismInfo* info : mechanisms) {
    for (const Property* property : properties) {
      const int64_t each =
          int64_t(info->cases.size() * EachForm(*info, *property, settings).size());
      for (const ops::Impl impl : settings.implementations)
        count += property->Runs(impl, settings) ? each : 0;
    }
  }
  return count;
}

}  // namespace cistern::verify
