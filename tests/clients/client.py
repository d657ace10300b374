"""A client that knows nothing but the .proto files: stubs made by grpcio-tools, status details by grpcio-status.

usage: client.py PORT PROTO_DIRECTORY; prints one JSON object, fails by an exception.
"""

import importlib
import json
import sys
import tempfile
from pathlib import Path

import grpc
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from grpc_status import rpc_status
from grpc_tools import protoc


def stubs(protos):
    """Makes and imports the modules of the public API."""
    out = tempfile.mkdtemp()
    code = protoc.main(
        ["protoc", f"-I{protos}", f"--python_out={out}", f"--grpc_python_out={out}", "shimmer/v1/inference.proto"]
    )
    assert code == 0, "protoc failed"
    sys.path.insert(0, out)
    return (
        importlib.import_module("shimmer.v1.inference_pb2"),
        importlib.import_module("shimmer.v1.inference_pb2_grpc"),
    )


def collect(pb, stream):
    """Reads a whole generation and checks its form."""
    started, finished, tokens, text = None, None, [], ""
    for number, response in enumerate(stream):
        assert response.sequence == number, (response.sequence, number)
        assert finished is None, "an event after Finished"
        kind = response.WhichOneof("event")
        if kind == "started":
            assert number == 0
            started = response.started
        elif kind == "delta":
            tokens += response.delta.token_ids
            text += response.delta.text
        else:
            assert kind == "finished", kind
            finished = response.finished
    assert started is not None and finished is not None
    assert finished.usage.completion_tokens == len(tokens)
    return started, tokens, text, finished


def refusal(call):
    """The status of a call that must fail, with the fields it names."""
    try:
        for _ in call():
            pass
    except grpc.RpcError as error:
        status = rpc_status.from_call(error)
        fields, reasons = [], []
        for detail in status.details if status else []:
            bad_request, info = error_details_pb2.BadRequest(), error_details_pb2.ErrorInfo()
            if detail.Unpack(bad_request):
                fields += [violation.field for violation in bad_request.field_violations]
            elif detail.Unpack(info):
                reasons.append(info.reason)
        return error.code(), fields, reasons
    raise AssertionError("the call was not refused")


def main(port, protos):
    pb, pb_grpc = stubs(protos)
    channel = grpc.insecure_channel(f"127.0.0.1:{port}")
    api = pb_grpc.InferenceServiceStub(channel)

    model = api.GetModel(pb.GetModelRequest())
    assert [worker.state for worker in model.workers] == ["serving"] * 2, model.workers
    assert model.fingerprint.container_digest and model.vocab_size > 0

    text = "Once upon a time, żółw 你好 🙂"
    ids = api.Tokenize(pb.TokenizeRequest(text=text, add_special_tokens=False)).token_ids
    assert api.Detokenize(pb.DetokenizeRequest(token_ids=ids)).text == text

    greedy = pb.SamplingParams(temperature=0.0)
    stop = pb.StopParams(max_tokens=12, ignore_eos=True)
    output = pb.OutputParams(logits_digest=True, logprobs=3)
    request = pb.GenerateRequest(text=text, sampling=greedy, stop=stop, output=output)
    started, tokens, _, finished = collect(pb, api.Generate(request))
    assert started.fingerprint == model.fingerprint
    assert started.max_tokens == 12 and len(tokens) == 12
    assert finished.reason == pb.FINISH_REASON_LENGTH
    assert sum(worker.expert_rows for worker in finished.timings.workers) > 0
    again = collect(pb, api.Generate(request))
    assert (again[1], again[3].logits_sha256) == (tokens, finished.logits_sha256)

    chat = pb.Chat(messages=[pb.ChatMessage(role="user", content="Hi")])
    seeded = pb.SamplingParams(temperature=0.9, seed=7)
    collect(pb, api.Generate(pb.GenerateRequest(chat=chat, sampling=seeded, stop=stop)))

    # Cancelled by its client half-way; the server goes on serving.
    call = api.Generate(pb.GenerateRequest(request_id="mine", text=text, sampling=greedy))
    next(call)
    call.cancel()

    zero = pb.GenerateRequest(text="x", sampling=pb.SamplingParams(top_p=0.0))
    assert refusal(lambda: api.Generate(zero)) == (grpc.StatusCode.INVALID_ARGUMENT, ["sampling.top_p"], [])
    nothing = refusal(lambda: api.Generate(pb.GenerateRequest()))
    assert nothing[:2] == (grpc.StatusCode.INVALID_ARGUMENT, ["input"]), nothing

    health = health_pb2_grpc.HealthStub(channel)
    for service in ["", "shimmer.v1.InferenceService"]:
        answer = health.Check(health_pb2.HealthCheckRequest(service=service))
        assert answer.status == health_pb2.HealthCheckResponse.SERVING, service
    services = ProtoReflectionDescriptorDatabase(channel).get_services()
    assert "shimmer.v1.InferenceService" in services, services

    print(json.dumps({"tokens": list(tokens), "logits_sha256": finished.logits_sha256}))


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
