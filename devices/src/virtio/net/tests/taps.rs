//! Names, addresses and taps that are refused before anything is created.

use super::super::config::NetError;
use super::super::tap::TapError;
use super::super::{MacError, NetStateV1};
use super::*;

fn named(name: &str) -> Result<(), NetError> {
    NetConfig::new(TapSource::Name(name.to_owned())).validate()
}

#[test]
fn d11_bad_tap_name_is_refused() {
    for name in ["", "a234567890123456", "a/b", "tap%d", "a b", "a\0b", "..", ".", "ä", "a\n"] {
        let refused = named(name).unwrap_err();
        let is_name = matches!(&refused, NetError::Tap { source: TapError::Name, .. });
        assert!(is_name, "{name:?}: {refused}");
    }
    for name in ["tap0", "vm-1.eth_0", "a23456789012345"] {
        named(name).unwrap();
    }
}

#[test]
fn d11_descriptor_that_is_no_tap_is_refused() {
    for path in ["/dev/null", "/proc/self/exe"] {
        let file = std::fs::File::open(path).unwrap();
        let refused = Net::new(NetConfig::new(TapSource::File(file))).err().unwrap();
        assert!(matches!(refused, NetError::Tap { source: TapError::Kind, .. }), "{refused}");
    }
}

#[test]
fn mac_of_a_group_or_nobody_is_refused() {
    for mac in [[0; 6], [1, 0, 0, 0, 0, 1], [0xff; 6]] {
        let config = NetConfig { mac: Some(Mac(mac)), ..NetConfig::new(TapSource::Auto) };
        assert!(matches!(config.validate(), Err(NetError::Mac { .. })));
    }
    let random = Mac::random().unwrap();
    assert_eq!(random.0[0] & 3, 2);
    assert_ne!(random, Mac::random().unwrap());
}

#[test]
fn mac_reads_what_it_writes_and_nothing_else() {
    assert_eq!("02:00:00:00:00:09".parse(), Ok(MAC));
    assert_eq!(MAC.to_string().parse(), Ok(MAC));
    assert_eq!("FE:ff:0A:b0:00:01".parse(), Ok(Mac([0xfe, 0xff, 0x0a, 0xb0, 0, 1])));
    for text in ["", "02:00:00:00:00", "02:00:00:00:00:09:1", "2:0:0:0:0:9", "02:00:00:00:00:+9"] {
        assert_eq!(text.parse::<Mac>(), Err(MacError), "{text:?}");
    }
}

#[test]
fn mtu_out_of_range_is_refused() {
    for mtu in [0, 67] {
        let config = NetConfig { mtu: Some(mtu), ..NetConfig::new(TapSource::Auto) };
        assert!(matches!(config.validate(), Err(NetError::Mtu { .. })));
    }
}

#[test]
fn restore_of_impossible_or_other_card_is_refused() {
    let restore = |state, mtu| {
        let config = NetConfig { mtu, ..NetConfig::new(TapSource::Name("a/b".to_owned())) };
        Net::restore(config, &state).err().unwrap()
    };
    let good = NetStateV1 { mac: MAC, mtu: Some(1500), mmds: None };
    let group = NetStateV1 { mac: Mac([1; 6]), ..good };
    assert!(matches!(restore(group, None), NetError::Mac { .. }));
    let tiny = NetStateV1 { mtu: Some(1), ..good };
    assert!(matches!(restore(tiny, None), NetError::Mtu { .. }));
    assert!(matches!(restore(good, Some(9000)), NetError::SavedMtu { .. }));
    // The state is valid: it is the name that is refused.
    assert!(matches!(restore(good, Some(1500)), NetError::Tap { .. }));
}
