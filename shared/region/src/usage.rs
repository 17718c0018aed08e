//! How much of a mapping is really shared, by the kernel's own account.

use std::io;
use std::ops::Range;

use crate::Region;

/// Resident bytes of the mappings behind one region in this process, from `/proc/self/smaps`.
///
/// "Shared" means mapped by at least two processes (or twice by this one) at this moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MappingUsage {
    /// All resident bytes.
    pub rss: u64,
    /// Shared, equal to the backing file.
    pub shared_clean: u64,
    /// Shared, newer than any backing file: what a memfd in use by two processes shows.
    pub shared_dirty: u64,
    /// Of this process alone, equal to the backing file.
    pub private_clean: u64,
    /// Of this process alone: what a copy would show.
    pub private_dirty: u64,
}

/// Reads the usage of the mappings that `region` lies in. A [`Local`](crate::Local) region shares its mapping with
/// the rest of the heap, which is then counted with it. The kernel walks the page tables of the whole process for
/// this: it is for reports, not for every step.
///
/// # Errors
/// Where `/proc/self/smaps` cannot be read, does not parse, or does not list the region; a region on a device has none.
pub fn mapping_usage(region: &dyn Region) -> io::Result<MappingUsage> {
    let bytes = region.host_bytes().map_err(|e| io::Error::new(io::ErrorKind::Unsupported, e))?;
    let range = bytes.as_ptr_range();
    let smaps = std::fs::read_to_string("/proc/self/smaps")?;
    sum(&smaps, range.start as u64..range.end as u64)
}

fn sum(smaps: &str, wanted: Range<u64>) -> io::Result<MappingUsage> {
    let invalid =
        |what: &str| io::Error::new(io::ErrorKind::InvalidData, format!("/proc/self/smaps: {what}"));
    let mut usage = MappingUsage::default();
    let (mut listed, mut inside) = (false, false);
    for line in smaps.lines() {
        let mut words = line.split_ascii_whitespace();
        let Some(first) = words.next() else { continue };
        let Some(field) = first.strip_suffix(':') else {
            let mapping = parse_range(first).ok_or_else(|| invalid("a mapping without a range"))?;
            inside = mapping.start < wanted.end && wanted.start < mapping.end;
            listed |= inside;
            continue;
        };
        let total = match field {
            "Rss" => &mut usage.rss,
            "Shared_Clean" => &mut usage.shared_clean,
            "Shared_Dirty" => &mut usage.shared_dirty,
            "Private_Clean" => &mut usage.private_clean,
            "Private_Dirty" => &mut usage.private_dirty,
            _ => continue,
        };
        if inside {
            let kib: u64 = words.next().and_then(|n| n.parse().ok()).ok_or_else(|| invalid(field))?;
            *total += kib * 1024;
        }
    }
    if listed { Ok(usage) } else { Err(invalid("does not list the region")) }
}

fn parse_range(text: &str) -> Option<Range<u64>> {
    let (start, end) = text.split_once('-')?;
    Some(u64::from_str_radix(start, 16).ok()?..u64::from_str_radix(end, 16).ok()?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Local, MemfdBuilder};

    const SMAPS: &str = "\
1000-3000 r--s 00000000 00:01 7 /memfd:weights (deleted)
Size:                  8 kB
Rss:                   8 kB
Shared_Clean:          0 kB
Shared_Dirty:          4 kB
Private_Clean:         0 kB
Private_Dirty:         4 kB
VmFlags: rd sh mr
3000-4000 rw-p 00000000 00:00 0 [heap]
Rss:                   4 kB
Private_Dirty:         4 kB
";

    #[test]
    fn only_the_mappings_that_overlap_are_summed() {
        let memfd = sum(SMAPS, 0x1000..0x1001).unwrap();
        assert_eq!((memfd.rss, memfd.shared_dirty, memfd.private_dirty), (8192, 4096, 4096));
        assert_eq!(sum(SMAPS, 0x3000..0x3100).unwrap().rss, 4096);
        assert_eq!(sum(SMAPS, 0x2000..0x3100).unwrap().rss, 12288);
        assert!(sum(SMAPS, 0x4000..0x5000).is_err());
        assert!(sum("1000-2000 r--s\nRss: many kB\n", 0x1000..0x1001).is_err());
    }

    #[test]
    fn a_touched_region_is_resident() {
        let mut builder = MemfdBuilder::new("usage", 1 << 20).unwrap();
        builder.bytes_mut().fill(1);
        let memfd = builder.seal().unwrap();
        let usage = mapping_usage(&memfd).unwrap();
        assert_eq!(usage.rss, 1 << 20, "{usage:?}");

        let local = Local::copy_of(&[1; 1 << 16]);
        assert!(mapping_usage(&local).unwrap().private_dirty >= 1 << 16);
    }
}
