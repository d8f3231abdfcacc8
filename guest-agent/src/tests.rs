//! Tests of the codec, the windows and the tail ring.
//!
//! Most inputs are hostile: whatever comes, nothing panics and nothing grows.

use proptest::prelude::*;

use crate::frame::{Channel, Decoder, END, FrameError, HEADER_LEN, Header, Kind, credit_frame};
use crate::limits::{MAX_CONTROL, MAX_DATA, MAX_DEPTH, MAX_SMALL, MAX_WINDOW};
use crate::message::{
    Answer, Code, Command, Detach, Exec, ExecReport, ExecStatus, Failure, Limits, Outcome,
    OutputLimit, Request, Stage, WindowSize,
};
use crate::output::Tail;
use crate::window::{ReceiveWindow, SendWindow, WindowError};
use crate::{decode, encode};

fn raw(len: u32, stream: u32, kind: u8, flags: u8, reserved: u16) -> [u8; HEADER_LEN] {
    let mut bytes = [0; HEADER_LEN];
    bytes[..4].copy_from_slice(&len.to_le_bytes());
    bytes[4..8].copy_from_slice(&stream.to_le_bytes());
    bytes[8] = kind;
    bytes[9] = flags;
    bytes[10..].copy_from_slice(&reserved.to_le_bytes());
    bytes
}

fn frames_of(
    mut input: &[u8],
    decoder: &mut Decoder,
) -> Result<Vec<(Header, Vec<u8>)>, FrameError> {
    let mut frames = Vec::new();
    while let Some(frame) = decoder.next(&mut input)? {
        frames.push((frame.header, frame.payload.to_vec()));
    }
    assert!(input.is_empty());
    Ok(frames)
}

#[test]
fn g1_header_with_a_length_beyond_its_kind_is_refused() {
    for (kind, most) in
        [(1, MAX_SMALL), (3, MAX_CONTROL), (5, MAX_DATA), (6, 4), (8, 0), (9, MAX_CONTROL)]
    {
        let stream = u32::from(kind != 1);
        let len = most as u32;
        assert!(
            Header::parse(&raw(len, stream, kind, END * u8::from(kind == 5), 0)).is_ok(),
            "{kind}"
        );
        for len in [len + 1, u32::MAX, i32::MIN as u32] {
            let refused = Header::parse(&raw(len, stream, kind, 0, 0));
            assert!(matches!(refused, Err(FrameError::BadLength { .. })), "{kind} {len}");
        }
    }
}

#[test]
fn g1_header_with_no_payload_is_refused_where_one_must_be() {
    for kind in [1, 2, 3, 4, 6, 7, 9, 10] {
        let stream = u32::from(!matches!(kind, 1 | 2 | 10));
        let refused = Header::parse(&raw(0, stream, kind, 0, 0));
        assert!(matches!(refused, Err(FrameError::BadLength { .. })), "{kind}");
    }
    assert_eq!(Header::parse(&raw(0, 1, 5, 0, 0)), Err(FrameError::EmptyData));
    assert!(Header::parse(&raw(0, 1, 5, END, 0)).is_ok());
}

#[test]
fn header_with_unknown_parts_is_refused() {
    assert_eq!(Header::parse(&raw(1, 1, 0, 0, 0)), Err(FrameError::UnknownKind(0)));
    assert_eq!(Header::parse(&raw(1, 1, 127, 0, 0)), Err(FrameError::UnknownKind(127)));
    assert_eq!(Header::parse(&raw(1, 1, 3, 0, 9)), Err(FrameError::Reserved(9)));
    for flags in [3, 4, 0x40] {
        let refused = Header::parse(&raw(1, 1, 5, flags, 0));
        assert!(matches!(refused, Err(FrameError::UnknownFlags { .. })), "{flags}");
    }
    assert!(matches!(Header::parse(&raw(1, 1, 3, 1, 0)), Err(FrameError::UnknownFlags { .. })));
    assert!(matches!(Header::parse(&raw(1, 1, 1, 0, 0)), Err(FrameError::BadStream { .. })));
    assert!(matches!(Header::parse(&raw(1, 0, 5, 0, 0)), Err(FrameError::BadStream { .. })));
}

#[test]
fn header_of_an_extension_is_let_through_within_bounds() {
    let header = Header::parse(&raw(5, 0, 0x93, 0xff, 7)).unwrap();
    assert_eq!(header.kind, Kind::Extension(0x93));
    assert!(Header::parse(&raw(MAX_SMALL as u32 + 1, 0, 0x93, 0, 0)).is_err());
}

#[test]
fn g1_decoder_holds_only_what_came_of_a_large_frame() {
    let mut decoder = Decoder::default();
    let header = raw(MAX_CONTROL as u32, 1, 3, 0, 0);
    assert!(frames_of(&header, &mut decoder).unwrap().is_empty());
    assert!(frames_of(&[0; 100], &mut decoder).unwrap().is_empty());
    assert_eq!(decoder.held(), HEADER_LEN + 100);
    assert!(decoder.in_frame());
}

#[test]
fn credit_frame_is_read_back() {
    let bytes = credit_frame(7, Channel::Error, 12345, true);
    let mut decoder = Decoder::default();
    let mut input = &bytes[..];
    let frame = decoder.next(&mut input).unwrap().unwrap();
    assert_eq!(
        (frame.credit(), frame.header.channel(), frame.header.ends()),
        (12345, Channel::Error, true)
    );
}

fn exec() -> Exec {
    Exec {
        command: Command::Argv(vec![b"a\xff".to_vec().into()]),
        env: vec![(b"K".to_vec().into(), b"\0v".to_vec().into())],
        clear_env: true,
        cwd: Some(b"/".to_vec().into()),
        user: Some("me".into()),
        stdin: true,
        timeout_ms: Some(u64::MAX),
        grace_ms: None,
        output_limit: Some(OutputLimit { head: 1, tail: 2 }),
        pty: Some(WindowSize { rows: 1, columns: u16::MAX }),
        detach: Some(Detach { keep: Some(1) }),
        limits: Some(Limits { pids: Some(1), ..Limits::default() }),
    }
}

#[test]
fn message_is_read_back() {
    let mut frame = Vec::new();
    encode(&mut frame, Kind::Open, 3, &Request::Exec(exec())).unwrap();
    assert_eq!(decode::<Request>(&frame[HEADER_LEN..]).unwrap(), Request::Exec(exec()));
    let failure = Failure {
        code: Code::Io,
        errno: Some(2),
        path: Some(b"/x".to_vec().into()),
        message: "m".into(),
    };
    frame.clear();
    encode(&mut frame, Kind::Done, 3, &Outcome::Failed(failure.clone())).unwrap();
    assert_eq!(decode::<Outcome>(&frame[HEADER_LEN..]).unwrap(), Outcome::Failed(failure));
}

#[test]
fn message_with_fields_left_out_takes_defaults() {
    let map =
        std::collections::BTreeMap::from([("ping", std::collections::BTreeMap::<&str, ()>::new())]);
    let bytes = rmp_serde::to_vec_named(&map).unwrap();
    assert_eq!(decode::<Request>(&bytes).unwrap(), Request::Ping {});
}

#[test]
fn message_of_a_later_version_is_read_as_far_as_known() {
    #[derive(serde::Serialize)]
    struct Later {
        status: ExecStatus,
        surprise: Vec<u32>,
    }
    let later = Later { status: ExecStatus::Exited { code: 1 }, surprise: vec![1, 2, 3] };
    let bytes = rmp_serde::to_vec_named(&later).unwrap();
    assert_eq!(decode::<ExecReport>(&bytes).unwrap().status, ExecStatus::Exited { code: 1 });
    let code = rmp_serde::to_vec_named("a_code_of_tomorrow").unwrap();
    assert_eq!(decode::<Code>(&code).unwrap(), Code::Other);
    assert_eq!(decode::<Stage>(&code).unwrap(), Stage::Other);
}

#[test]
fn message_with_trailing_bytes_is_refused() {
    let mut bytes = rmp_serde::to_vec_named(&Outcome::Ok(Answer::Done {})).unwrap();
    assert!(decode::<Outcome>(&bytes).is_ok());
    bytes.push(0);
    assert!(decode::<Outcome>(&bytes).is_err());
}

#[test]
fn g7_message_nested_too_deep_is_refused() {
    // In an unknown field, so that only skipping it has to go deep.
    let nested = |depth: usize| {
        let mut bytes = vec![0x82, 0xa6];
        bytes.extend_from_slice(b"status\x81\xa6exited\x81\xa4code\x00");
        bytes.extend_from_slice(b"\xa1x");
        bytes.extend(std::iter::repeat_n(0x91, depth));
        bytes.push(0xc0);
        bytes
    };
    assert!(decode::<ExecReport>(&nested(2)).is_ok());
    assert!(decode::<ExecReport>(&nested(MAX_DEPTH + 1)).is_err());
    assert!(decode::<ExecReport>(&nested(1_000_000)).is_err());
}

#[test]
fn g7_message_that_announces_more_than_it_has_is_refused() {
    for bytes in [
        &[0xdd, 0xff, 0xff, 0xff, 0xff][..],
        &[0xdf, 0xff, 0xff, 0xff, 0xff],
        &[0xc6, 0xff, 0xff, 0xff, 0xff],
    ] {
        assert!(decode::<Request>(bytes).is_err());
        assert!(decode::<Vec<serde_bytes::ByteBuf>>(bytes).is_err());
    }
}

#[test]
fn message_too_large_for_its_frame_leaves_the_buffer_alone() {
    let mut out = vec![1, 2, 3];
    let huge =
        Request::Exec(Exec { command: Command::Shell(vec![0; MAX_CONTROL].into()), ..exec() });
    assert!(encode(&mut out, Kind::Open, 1, &huge).is_err());
    assert_eq!(out, [1, 2, 3]);
}

#[test]
fn window_is_not_overrun_and_not_overfilled() {
    let mut send = SendWindow::new(10);
    send.sent(10);
    assert_eq!(send.left(), 0);
    send.grant(MAX_WINDOW).unwrap();
    assert!(matches!(send.grant(1), Err(WindowError::Overflow { .. })));
    let mut receive = ReceiveWindow::new(10);
    receive.received(10).unwrap();
    assert!(matches!(receive.received(1), Err(WindowError::Overrun { .. })));
    assert_eq!(receive.consumed(4), None);
    assert_eq!(receive.consumed(1), Some(5));
    receive.received(5).unwrap();
    assert!(receive.received(1).is_err());
}

#[test]
fn decoder_knows_what_a_frame_still_needs() {
    let mut decoder = Decoder::default();
    let frame = [&raw(1000, 1, 5, 0, 0)[..], &[7; 1000]].concat();
    for (end, missing) in [(0, 0), (1, HEADER_LEN - 1), (HEADER_LEN, 1000), (HEADER_LEN + 999, 1)] {
        frames_of(&frame[..end], &mut decoder).unwrap();
        assert_eq!(decoder.missing(), missing, "after {end} bytes");
        decoder = Decoder::default();
    }
    assert_eq!(frames_of(&frame, &mut decoder).unwrap().len(), 1);
    assert_eq!(decoder.missing(), 0);
}

#[test]
fn window_that_grows_does_so_once_and_with_a_grant() {
    let mut receive = ReceiveWindow::new(10);
    receive.grow_to(100);
    receive.received(10).unwrap();
    assert!(receive.received(1).is_err());
    assert_eq!(receive.consumed(5), Some(5 + 90));
    receive.received(95).unwrap();
    assert!(receive.received(1).is_err());
    assert_eq!(receive.consumed(49), None);
    assert_eq!(receive.consumed(1), Some(50));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn decoder_gives_the_same_frames_however_the_bytes_are_cut(
        payloads in prop::collection::vec(prop::collection::vec(any::<u8>(), 1..300), 1..8),
        cuts in prop::collection::vec(1usize..100, 1..60),
    ) {
        let mut bytes = Vec::new();
        for (index, payload) in payloads.iter().enumerate() {
            bytes.extend_from_slice(&Header::new(Kind::Data, index as u32 + 1, 0, payload.len()).to_bytes());
            bytes.extend_from_slice(payload);
        }
        let mut decoder = Decoder::default();
        let mut found = Vec::new();
        let mut rest = &bytes[..];
        for cut in cuts.iter().cycle() {
            let (piece, after) = rest.split_at((*cut).min(rest.len()));
            found.extend(frames_of(piece, &mut decoder).unwrap().into_iter().map(|(_, payload)| payload));
            rest = after;
            if rest.is_empty() {
                break;
            }
        }
        prop_assert_eq!(found, payloads);
        prop_assert!(!decoder.in_frame());
    }

    #[test]
    fn decoder_never_panics_nor_holds_more_than_a_frame(
        pieces in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..200), 0..20),
    ) {
        let mut decoder = Decoder::default();
        for piece in pieces {
            if frames_of(&piece, &mut decoder).is_err() {
                break;
            }
            prop_assert!(decoder.held() <= HEADER_LEN + MAX_CONTROL);
        }
    }

    #[test]
    fn decode_of_any_bytes_never_panics(bytes in prop::collection::vec(any::<u8>(), 0..400)) {
        let _ = decode::<Request>(&bytes);
        let _ = decode::<Outcome>(&bytes);
        let _ = decode::<crate::message::Welcome>(&bytes);
        let _ = decode::<crate::message::DirEntry>(&bytes);
    }

    #[test]
    fn tail_keeps_the_last_bytes_and_the_count(
        pieces in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..40), 0..20),
        cap in 0usize..50,
    ) {
        let mut tail = Tail::new(cap);
        let all: Vec<u8> = pieces.concat();
        pieces.iter().for_each(|piece| tail.push(piece));
        let kept = all.len().min(cap);
        prop_assert_eq!(tail.forgotten(), (all.len() - kept) as u64);
        prop_assert_eq!(tail.into_bytes(), &all[all.len() - kept..]);
    }

    /// Both ends of a window, with frames in flight, for any order of steps.
    #[test]
    fn windows_of_both_ends_agree(
        steps in prop::collection::vec((any::<bool>(), 1usize..60), 0..200),
        grown in prop::sample::select(vec![0u32, 64, 200]),
    ) {
        let (mut send, mut receive) = (SendWindow::new(64), ReceiveWindow::new(64));
        receive.grow_to(grown);
        let mut held = 0usize;
        for (sends, count) in steps {
            if sends {
                let count = count.min(send.left());
                send.sent(count);
                prop_assert!(receive.received(count).is_ok());
                held += count;
            } else {
                let count = count.min(held);
                held -= count;
                if let Some(grant) = receive.consumed(count) {
                    prop_assert!(send.grant(grant).is_ok());
                }
            }
            prop_assert!(held <= grown.max(64) as usize);
            // Nothing held and no credit would be a stream that never moves again.
            prop_assert!(held > 0 || send.left() > 0);
        }
    }
}
