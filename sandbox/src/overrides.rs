//! Overrides for a fork or a restored VM: taps, drives, the vsock socket and its CID.
//!
//! Shared by `pvmm fork` and `restore`. Flags are kept as text and parsed once per fork, because
//! the forks of one command differ: each has its own number and its own random MAC address.

use std::ffi::OsString;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use pvmm::agent::Refresh;
use pvmm::{Drive, Mac, Overrides, TapSource, Template};

use crate::drive::{self, DriveFlag};
use crate::egress;
use crate::failure::Failure;
use crate::net_card::{self, NetCard, TapWish};

/// The guest's vsock CID; all VMs may use one, because each has its own socket.
pub const GUEST_CID: u32 = 3;

/// The overrides of all forks of one command, as text.
#[derive(Clone, Debug, Default)]
pub struct CopyFlags {
    /// Taps and addresses of the network cards; the first is for eth0.
    pub net: Vec<String>,
    /// Images for drives, as in `vdc=PATH,ro`.
    pub drive: Vec<String>,
    /// Where the socket of the vsock device is shown.
    pub vsock: Option<PathBuf>,
    pub cid: Option<u32>,
}

/// The overrides of one fork.
#[derive(Clone, Debug, Default)]
pub struct CopyParts {
    nets: Vec<NetCard>,
    drives: Vec<(usize, DriveFlag)>,
    vsock: Option<PathBuf>,
    cid: Option<u32>,
    /// A device without a `--net` flag gets a new tap, instead of the one named in the template.
    makes_taps: bool,
}

/// Checks the text of a network card.
pub fn net_text(text: &str) -> Result<String, String> {
    net_card::parse_copy(text).map(|_| text.to_owned())
}

/// Checks the text of a drive.
pub fn drive_text(text: &str) -> Result<String, String> {
    drive_at(text).map(|_| text.to_owned())
}

/// Parses `vdc=PATH,…`: the index of a drive, and its new image.
fn drive_at(text: &str) -> Result<(usize, DriveFlag), String> {
    const SHAPE: &str = "write the drive's name in the guest and a path, as in vdc=disk.img";
    let (name, drive) = text.split_once('=').ok_or(SHAPE)?;
    match name.strip_prefix("vd").map(str::as_bytes) {
        Some([letter @ b'a'..=b'z']) => Ok((usize::from(letter - b'a'), drive::parse(drive)?)),
        _ => Err(SHAPE.to_owned()),
    }
}

impl CopyFlags {
    /// Returns the overrides of the fork with this number; a single fork has no number. Relative
    /// paths start at the current directory.
    pub fn of_copy(&self, number: Option<u32>, makes_taps: bool) -> Result<CopyParts, Failure> {
        let nets = self.net.iter().map(|text| {
            let card = net_card::parse_copy(text)?;
            Ok(match number {
                Some(number) => card.numbered(number),
                None => card,
            })
        });
        let nets = nets.collect::<Result<_, String>>().map_err(Failure::usage)?;
        let drives = self.drive.iter().map(|text| drive_at(text));
        let drives: Vec<_> = drives.collect::<Result<_, String>>().map_err(Failure::usage)?;
        if number.is_some() && drives.iter().any(|(_, drive)| !drive.read_only) {
            return Err(Failure::usage("--drive: several copies cannot write to one image")
                .hint("add ',ro', or make one copy at a time"));
        }
        let vsock = self.vsock.as_deref().map(|path| socket(path, number)).transpose()?;
        Ok(CopyParts { nets, drives, vsock, cid: self.cid, makes_taps })
    }
}

/// Returns the path of a fork's vsock socket: absolute, with the fork's number appended.
fn socket(path: &Path, number: Option<u32>) -> Result<PathBuf, Failure> {
    let path = std::path::absolute(path)?;
    Ok(match number {
        Some(number) => {
            let mut name = OsString::from(path);
            name.push(format!("-{number}"));
            name.into()
        }
        None => path,
    })
}

impl CopyParts {
    /// Returns the path of the vsock socket, if one was given.
    pub fn vsock(&self) -> Option<&Path> {
        self.vsock.as_deref()
    }

    /// Returns the guest's vsock CID.
    pub fn cid(&self) -> u32 {
        self.cid.unwrap_or(GUEST_CID)
    }

    /// Returns the places of the drives that get other images.
    pub fn drive_places(&self) -> impl Iterator<Item = usize> {
        self.drives.iter().map(|(place, _)| *place)
    }

    /// Returns the drive that was given for a place.
    pub fn drive_at(&self, place: usize) -> Option<Drive> {
        let given = self.drives.iter().find(|(at, _)| *at == place);
        given.map(|(_, drive)| drive.clone().into_drive())
    }

    /// Returns the network card of a VM that is booted in place of one with these `taps`.
    pub fn boot_card(&self, taps: &[String]) -> Result<Option<NetCard>, Failure> {
        let mut cards = self.cards(taps);
        if cards.len() > 1 {
            return Err(Failure::usage("--net: a VM that is booted has one network card"));
        }
        let Some(mut card) = cards.pop() else { return Ok(None) };
        match (&card.tap, taps.first()) {
            (TapWish::Egress, _) => Ok(Some(egress::card()?)),
            (TapWish::Unsaid, Some(tap)) => {
                card.tap = TapWish::Name(tap.clone());
                Ok(Some(card))
            }
            (TapWish::Unsaid, None) => {
                Err(Failure::usage("--net: the tap is missing").hint("write tap=NAME, or tap=auto"))
            }
            _ => Ok(Some(card)),
        }
    }

    /// Builds the library's overrides, all but the vsock device. `frames` is the socket of the card
    /// without a tap.
    pub fn overrides(&self, template: &Template, mut frames: Option<OwnedFd>) -> Overrides {
        let nets = self.cards(template.taps()).into_iter().enumerate();
        let same = |place: usize| template.taps().get(place).map_or("", String::as_str);
        Overrides {
            drives: self
                .drives
                .iter()
                .map(|(place, drive)| (*place, drive.clone().into_drive()))
                .collect(),
            nets: nets
                .map(|(place, card)| {
                    let mut config = card.config(same(place));
                    if card.tap == TapWish::Egress
                        && let Some(frames) = frames.take()
                    {
                        config.tap = TapSource::Socket(frames);
                    }
                    (place, config)
                })
                .collect(),
            ..Overrides::default()
        }
    }

    /// Gives the card without a tap, if the template has one, its settings.
    pub fn complete(&mut self, template: &Template) -> Result<Option<Mac>, Failure> {
        let Some(place) = template.taps().iter().position(|tap| tap == egress::LINK_NAME) else {
            return Ok(None);
        };
        self.nets.resize_with(self.nets.len().max(place + 1), NetCard::default);
        match self.nets.get_mut(place) {
            Some(card) if card.tap == TapWish::Unsaid => {
                *card = egress::card()?;
                Ok(card.mac)
            }
            _ => Ok(None),
        }
    }

    /// Adds the settings of the guest's network devices to its refresh.
    pub fn tell(&self, template: &Template, refresh: Refresh) -> Refresh {
        let cards = self.cards(template.taps()).into_iter().enumerate();
        cards.fold(refresh, |refresh, (place, card)| card.tell_copy(refresh, place))
    }

    /// Returns one entry per device of the template, and any in excess, which the library refuses.
    fn cards(&self, taps: &[String]) -> Vec<NetCard> {
        let mut cards = self.nets.clone();
        cards.resize_with(cards.len().max(taps.len()), NetCard::default);
        for (card, _) in cards
            .iter_mut()
            .zip(taps)
            .filter(|(card, tap)| card.tap == TapWish::Unsaid && tap.as_str() == egress::LINK_NAME)
        {
            card.tap = TapWish::Egress;
        }
        for card in cards.iter_mut().filter(|card| self.makes_taps && card.tap == TapWish::Unsaid) {
            card.tap = TapWish::Auto;
        }
        cards
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn flags(net: &[&str], drive: &[&str], vsock: Option<&str>) -> CopyFlags {
        let texts = |all: &[&str]| all.iter().map(|text| (*text).to_owned()).collect();
        CopyFlags { net: texts(net), drive: texts(drive), vsock: vsock.map(Into::into), cid: None }
    }

    #[test]
    fn copies_of_one_command_have_taps_and_sockets_of_their_own() {
        let flags = flags(&["tap=web,mac=random"], &["vdc=/a.img,ro"], Some("/run/v"));
        let (one, two) =
            (flags.of_copy(Some(1), true).unwrap(), flags.of_copy(Some(2), true).unwrap());
        assert_eq!(one.nets[0].tap, TapWish::Name("web-1".into()));
        assert_ne!(one.nets[0].mac, two.nets[0].mac);
        assert_eq!(two.vsock(), Some(Path::new("/run/v-2")));
        assert_eq!(one.drives[0].0, 2);
        assert_eq!(flags.of_copy(None, true).unwrap().vsock(), Some(Path::new("/run/v")));
    }

    #[test]
    fn card_of_which_nothing_is_said_gets_a_tap_that_is_made_or_that_of_its_template() {
        let taps = ["t0".to_owned(), "t1".to_owned()];
        let made = flags(&["tap=own"], &[], None).of_copy(None, true).unwrap().cards(&taps);
        assert_eq!((&made[0].tap, &made[1].tap), (&TapWish::Name("own".into()), &TapWish::Auto));
        let same = CopyFlags::default().of_copy(None, false).unwrap().cards(&taps);
        assert!(same.len() == 2 && same.iter().all(|card| card.tap == TapWish::Unsaid));
    }

    #[test]
    fn image_that_several_copies_would_write_is_refused_and_so_is_a_drive_without_a_place() {
        let writable = flags(&[], &["vdc=/a.img"], None);
        assert!(writable.of_copy(None, true).is_ok());
        assert!(writable.of_copy(Some(1), true).unwrap_err().message.contains("--drive"));
        for bad in ["", "/a.img", "vd=/a", "vda", "vdA=/a", "vdaa=/a", "vdc=", "vdc=/a,rw"] {
            assert!(drive_text(bad).is_err(), "{bad}");
        }
    }
}
