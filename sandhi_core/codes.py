"""Every code that a problem can have, what it means and what helps. docs/problems.md is this file, printed:
`python -m sandhi_core.codes > docs/problems.md`.

Codes are stable: scripts may rely on them. A problem's own message and remedy are about the case at hand. Their order
is that of reports: what keeps a whole model from being looked at comes before what is wrong with a part of it.
"""

from typing import Annotated, Literal, NamedTuple

from pydantic import AfterValidator

Severity = Literal["error", "warning", "either"]


class Explanation(NamedTuple):
    means: str
    remedy: str
    severity: Severity = "error"


CODES: dict[str, dict[str, Explanation]] = {
    "Files of a checkpoint": {
        "directory-missing": Explanation("The path of a model is no directory.", "Correct the path in the pool file."),
        "hub-not-cached": Explanation(
            "A hub id is not in the local cache, and models are never fetched.",
            "`hf download` it first, or give the path of a directory.",
        ),
        "config-missing": Explanation("There is no config.json.", "Use a directory that save_pretrained wrote."),
        "config-invalid": Explanation(
            "config.json is no JSON object, contradicts itself, or means different things to different loaders.",
            "Take the file from the model's source again, or correct the field that is named.",
        ),
        "weights-missing": Explanation(
            "There are no safetensors files under the names that loaders look for.",
            "Use a directory that save_pretrained wrote; rename a single file to model.safetensors.",
        ),
        "weights-ambiguous": Explanation(
            "A single file and an index of shards are both there, and loaders disagree which is the model.",
            "Remove the one that is stale.",
        ),
        "weights-stray": Explanation(
            "A weight file belongs to nothing; some loaders read every such file.", "Move it out of the directory."
        ),
        "weights-ignored": Explanation(
            "Weights in other formats (pickles, GGUF and the like) lie beside those that are read.",
            "Nothing; they are neither read nor exported.",
            "warning",
        ),
        "pickle-only": Explanation(
            "The weights are a pickle, which can run code when it is read, and never is.",
            "Where you trust it, load it elsewhere and save_pretrained.",
        ),
        "adapter-only": Explanation(
            "The directory holds an adapter (PEFT), not a model.", "Merge it into its base, and save the result."
        ),
        "adapter-beside": Explanation(
            "An adapter lies beside whole weights: some loaders apply it, some do not.", "Move its files elsewhere."
        ),
        "shard-missing": Explanation("A shard that the index names is not there.", "Download it again."),
        "index-invalid": Explanation(
            "The index of the shards is no such index, or names files that are none beside it.",
            "Write weights and index anew with save_pretrained.",
        ),
        "index-mismatch": Explanation(
            "Index and shards disagree about where a tensor is.", "Write weights and index anew with save_pretrained."
        ),
        "tensor-duplicated": Explanation(
            "A tensor is in two shards.", "Write weights and index anew with save_pretrained."
        ),
        "file-damaged": Explanation(
            "A safetensors file is truncated, too long, or none: sizes and header do not agree.", "Download it again."
        ),
        "file-changed": Explanation(
            "A file of a checkpoint changed, or went, while it was in use.",
            "Let whatever writes it finish, then run again.",
        ),
        "link-outside": Explanation(
            "A link leads out of the checkpoint: what is there is read and exported.",
            "Nothing, if that is meant.",
            "warning",
        ),
        "weights-unread": Explanation(
            "`--headers-only` leaves the weights unread: damage, NaN and duplicates would not be noticed.",
            "Leave it out; a build reads the weights in any case.",
            "warning",
        ),
        "file-irregular": Explanation(
            "Something that is neither a file nor a link to one lies in the directory.", "Move it elsewhere."
        ),
        "file-name": Explanation("The name of a file is not printable.", "Rename it."),
        "file-unreadable": Explanation(
            "A file or folder cannot be read: permission is missing, or its disk fails.",
            "Give read permission; of a disk that fails, put the model on another, from a sound copy.",
        ),
        "lfs-pointer": Explanation(
            "A file is a Git LFS pointer, not what it stands for.", "`git lfs pull`, or download it again."
        ),
        "link-dangling": Explanation("A link leads to a file that is gone.", "Download it again."),
    },
    "Configuration and tensors": {
        "model-type-unsupported": Explanation(
            "The architecture is none of those that are known tensor by tensor (nor are encoders and vision models).",
            "Leave the model out; the message lists what is supported.",
        ),
        "architectures-mismatch": Explanation(
            "config.json names another class than the causal language model that would be scored and served.",
            "Correct `architectures` where the weights are those of one; else leave the model out.",
        ),
        "config-unusable": Explanation(
            "transformers can make no model of config.json.", "Take the file from the model's source again."
        ),
        "remote-code": Explanation(
            "A configuration names code of its own (auto_map), which is never run.",
            "Nothing, if transformers' own classes are equivalent.",
            "warning",
        ),
        "quantised": Explanation(
            "Weights are quantised, by their dtype, their helpers' names, or the configuration.",
            "Use the unquantised checkpoint that this one was made from.",
        ),
        "tensor-missing": Explanation(
            "A tensor that the configuration asks for is not there; loaders would make it up.",
            "Save the whole model again with save_pretrained.",
        ),
        "tensor-unknown": Explanation(
            "A tensor is there that the architecture does not have; loaders would drop it.",
            "Save the whole model again with save_pretrained.",
        ),
        "tensor-shape": Explanation(
            "A tensor has another shape than the configuration asks for.", "Use the config.json of these weights."
        ),
        "head-differs": Explanation(
            "Embeddings and head are tied, yet the file holds another head: some loaders use it, some do not.",
            "Set tie_word_embeddings to false where it is meant, or remove it from the file.",
        ),
        "not-finite": Explanation(
            "A weight is NaN or infinite; the first row is named.", "Use a checkpoint without, or mend that row."
        ),
    },
    "Tokenizer": {
        "tokenizer-missing": Explanation("There is no tokenizer.", "Copy its files from the model's source."),
        "tokenizer-invalid": Explanation(
            "tokenizer.json is none that tokens can be read from.", "Copy the tokenizer's files from the source."
        ),
        "tokenizer-unusable": Explanation(
            "transformers cannot load the tokenizer.", "Copy the tokenizer's files from the model's source."
        ),
        "tokenizer-out-of-range": Explanation(
            "Some tokens have no row in the embeddings.",
            "Nothing, if such tokens never occur; else resize the embeddings.",
            "warning",
        ),
        "tokenizer-differs": Explanation(
            "Models that can share number their tokens differently; embeddings and heads are kept apart.",
            "Nothing; expect them to share less.",
            "warning",
        ),
    },
    "Pool and tasks": {
        "pool": Explanation("The pool file is not a valid pool; the line is named.", "Mend that line."),
        "task": Explanation(
            "A task cannot be built, has no such metric, or has too few questions.", "Mend the task file, or its name."
        ),
        "include-path": Explanation("`evaluation.include_path` is no folder.", "Name the folder of the task files."),
        "no-questions": Explanation("No question of a task falls into a split.", "Give it more questions."),
        "budget-too-fine": Explanation(
            "A budget is finer than one question of a split.", "Give it more questions, or a larger budget."
        ),
        "budget-uncertifiable": Explanation(
            "The holdout has too few questions to certify a budget.",
            "Give it more questions, a larger budget, or set `holdout.quality: point`.",
        ),
        "budget-coarse": Explanation(
            "A budget of twenty points or more is rather a slip.", "Nothing, if it is meant.", "warning"
        ),
        "same-checkpoint": Explanation(
            "Two models are one checkpoint.", "Give one of them the tasks of both.", "warning"
        ),
        "no-partner": Explanation(
            "A model agrees with no other in any projection, so it shares only exact duplicates.",
            "Serve it on its own, or add models of its kind.",
            "warning",
        ),
        "base-fits-nothing": Explanation(
            "A base has no matrix that two models of the pool could share.",
            "Name the checkpoint that they were trained from, or leave it out.",
        ),
        "no-adapters": Explanation(
            "A model can be an adapter of no base, whatever a search finds.",
            "Serve it apart, or as the message says.",
            "warning",
        ),
        "same-name": Explanation(
            "Another pool of this name was built in this artifact root.", "Give one another name or root.", "warning"
        ),
        "heads-beyond-cpu": Explanation(
            "vLLM's attention on a CPU does not take heads of this size.",
            "Give the model `engine: transformers`; nothing, if the pool is served on a GPU.",
            "warning",
        ),
        "additions-left-out": Explanation(
            "A model may get residuals or scaled rows, and `transformers serve` would leave them out.",
            "Serve it by vLLM with the plugin; nothing, if your own code uses sandhi_core.serving.load.",
            "warning",
        ),
        "shared-model": Explanation(
            "Another pool of this artifact root scores a model under other settings.",
            "Give both the same, or roots of their own.",
            "warning",
        ),
    },
    "Machine": {
        "device-missing": Explanation("`evaluation.device` is not there.", "Set it to cpu or auto."),
        "device-memory": Explanation(
            "A model takes more than `deploy.device_memory`.", "Set it to that of the real devices.", "warning"
        ),
        "disk-space": Explanation(
            "The disk has not enough room for an export, or may not have.",
            "Free space, or choose another --root.",
            "either",
        ),
        "unseen": Explanation(
            "Processes of other users may map an export: it is not known to be unused.",
            "Collect garbage as the user who serves, or as root; see the message.",
            "warning",
        ),
        "gone-pools": Explanation(
            "`--gone` says that pools of the root are no more, whose files were not given: all of them goes.",
            "Give their files too, or leave `--gone` out.",
            "warning",
        ),
        "root-unwritable": Explanation("The artifact root cannot be written.", "Give permission, or another --root."),
    },
    "Commands": {
        "usage": Explanation("The command was called wrongly.", "See its --help."),
        "stopped": Explanation("Ctrl-C or SIGTERM.", "The same command goes on from there."),
        "system": Explanation("The operating system refused something; the file is named.", "Mend that."),
        "defect": Explanation("A fault of Sandhi itself.", "SANDHI_DEBUG=1 shows where; please report it."),
        "build": Explanation("A step of a build failed; the log is named.", "As the message says."),
        "checkpoint": Explanation("A checkpoint cannot be used as asked.", "As the message says."),
        "evaluation": Explanation("A score could not be computed, or is not finite.", "As the message says."),
        "merge": Explanation(
            "A shared tensor cannot be made: an original changed, or the result is not finite.",
            "Run `sandhi check`, then build again.",
        ),
        "store": Explanation(
            "The artifact root cannot be written, or holds something else than was recorded.",
            "Give permission; what is damaged is made again where it is removed.",
        ),
        "proof": Explanation("Exported bytes are not the scored ones, or are not shared as claimed.", "Export anew."),
    },
    "Verifying an export": {
        "export-file": Explanation("A file is missing, differs, or is none of the export.", "Restore or export anew."),
        "export-tensor": Explanation("A tensor has other bytes than were scored.", "Restore or export anew."),
        "export-links": Explanation(
            "Files that should be one are several: the bytes are right, the disk is not spared.",
            "Copy exports with their hard links, such as by `cp -a` or `rsync -H`.",
        ),
        "export-memory": Explanation("Servers do not hold in common what they should.", "As the message says."),
        "export-answers": Explanation(
            "Servers answer otherwise than the scored weights, or too little was asked.",
            "As the message says.",
            "either",
        ),
        "deployment": Explanation(
            "deployment.json does not follow from the export, or promises what this machine does not have.",
            "Export anew, or deploy elsewhere.",
            "either",
        ),
        "originals": Explanation(
            "The original checkpoints are not known, or not those that were merged.",
            "Put them back, or name them by --originals or --pool.",
            "either",
        ),
    },
    "Serving": {
        "serving": Explanation(
            "An export cannot be served as asked, or a server did not come up or ended.", "As the message says."
        ),
        "vllm": Explanation(
            "vLLM with these options cannot serve the model from shared tensors.", "As the message says."
        ),
        "rank-invalid": Explanation("There is no such tensor-parallel rank.", "Ask for one below their number."),
        "ranks-unaligned": Explanation("So many ranks do not divide the model.", "Use another tensor-parallel size."),
    },
    "Sharing on a GPU": {
        "cuda-missing": Explanation("There is no CUDA driver, or no such device.", "Run it on a machine that has one."),
        "cuda-failed": Explanation("A call of the CUDA driver failed; it is named.", "As the driver says."),
        "device-invalid": Explanation("The name of a device is none.", "Give one such as cuda:0."),
        "device-unsupported": Explanation(
            "The device cannot lend memory to other processes.", "Serve without an owner, or on another device."
        ),
        "device-full": Explanation(
            "The device has too little memory free.", "Start the owner first, or use more ranks."
        ),
        "device-differs": Explanation("Owner and engine are on different devices.", "One owner for each device."),
        "manifest-differs": Explanation("Owner and engine serve different exports.", "One owner for each export."),
        "ranks-differ": Explanation("Owner and engine divide models differently.", "Start both for one size."),
        "rank-differs": Explanation("The owner holds another rank.", "One owner for each rank."),
        "model-unknown": Explanation("The owner's export has no such model.", "Ask for one that it has."),
        "not-held": Explanation("The owner does not hold a tensor that the engine needs.", "Start it for this export."),
        "nothing-shared": Explanation("The models share no matrix.", "Serve them without an owner."),
        "owner-absent": Explanation("No owner listens at the socket.", "Start it before the engines."),
        "owner-exists": Explanation("Another owner has the socket.", "Use that one, end it, or take another socket."),
        "socket-path": Explanation("The path of a socket cannot be used.", "Give one in a directory of this user."),
        "user-differs": Explanation("The other side belongs to another user.", "Run both as one user."),
        "protocol-differs": Explanation("Owner and engine are of different versions.", "Install one version for both."),
        "protocol-garbled": Explanation("What came over the socket makes no sense.", "Restart the owner."),
    },
}

_ALL = {code: explanation for section in CODES.values() for code, explanation in section.items()}
_RANK = {code: at for at, code in enumerate(_ALL)}


def _registered(code: str) -> str:
    if code not in _ALL:
        raise ValueError(f"{code!r} is no code of sandhi_core.codes")
    return code


Code = Annotated[str, AfterValidator(_registered)]
"""The code of a problem, one of those above."""


def severity(code: str) -> Severity:
    """Whether problems of a code are errors, warnings, or either."""
    return _ALL[code].severity


def rank(code: str) -> int:
    """Where a code stands among all, worst first."""
    return _RANK[code]


def document() -> str:
    """docs/problems.md."""
    lines = [
        "# Problems",
        "",
        "Every code of a problem that `sandhi` reports, as `--json` gives it in `problems` ([cli.md](cli.md)) and text",
        "output at the beginning of a line. Codes are stable. An error ends the command before anything expensive; a",
        "warning does not. Each problem names model, file and tensor where there is one, and its own remedy. `sandhi",
        "check` reports all problems of all models at once: errors first, and in the order of these tables.",
        "Written by `python -m sandhi_core.codes > docs/problems.md`.",
    ]
    for section, codes in CODES.items():
        lines += ["", f"## {section}", "", "| code | severity | means | remedy |", "|---|---|---|---|"]
        lines += [f"| `{c}` | {m.severity} | {m.means} | {m.remedy} |" for c, m in codes.items()]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(document(), end="")
