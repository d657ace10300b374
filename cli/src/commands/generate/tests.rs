use shimmer_proto::v1::{Finished, Timings, Usage};

use super::{
    Report,
    input::{LogitBias, synthetic},
};

fn check_bias(text: &str, expected: Option<(u32, f32)>) {
    let parsed = text.parse::<LogitBias>().ok();
    assert_eq!(parsed, expected.map(|(token, bias)| LogitBias { token, bias }), "{text}");
}

#[test]
fn logit_bias_is_a_pair() {
    check_bias("50256=-100", Some((50256, -100.0)));
    check_bias("1 = 0.5", Some((1, 0.5)));
    check_bias("1", None);
    check_bias("-1=3", None);
    check_bias("1=", None);
    check_bias("a=1", None);
}

#[test]
fn a_made_up_prompt_is_fixed_and_inside_the_vocabulary() {
    for vocab_size in [1, 2, 269, 49_152, u32::MAX] {
        let ids = synthetic(512, vocab_size);
        assert_eq!(ids.len(), 512);
        assert!(ids.iter().all(|&id| id < vocab_size));
        assert_eq!(ids, synthetic(512, vocab_size));
    }
    assert_eq!(synthetic(4, 1000), [618, 236, 854, 472]);
}

#[test]
fn rates_leave_out_what_was_not_measured() {
    let report = |prompt_tokens, completion_tokens, prefill_ms, decode_ms| Report {
        finished: Some(Finished {
            usage: Some(Usage { prompt_tokens, completion_tokens }),
            timings: Some(Timings { prefill_ms, decode_ms, ..Timings::default() }),
            ..Finished::default()
        }),
        ..Report::default()
    };
    assert_eq!(report(512, 1, 1000.0, 0.0).prefill_rate(), Some(512.0));
    assert_eq!(report(512, 1, 1000.0, 0.0).decode_rate(), None);
    assert_eq!(report(1, 129, 10.0, 2000.0).decode_rate(), Some(64.0));
    assert_eq!(report(1, 129, 10.0, 2000.0).json()["timings"]["decode_tokens_per_s"], 64.0);
}
