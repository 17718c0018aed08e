//! Where a service listens or is reached.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

/// `unix:/path` or `host:port` (with or without `http://`).
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Address {
    /// A unix socket in the file system.
    Unix(PathBuf),
    /// Host and port.
    Tcp(String),
}

/// An address that is neither form.
#[derive(Debug, thiserror::Error)]
#[error("address \"{given}\": {why}; want unix:/path/to.sock or host:port")]
pub struct AddressError {
    given: String,
    why: &'static str,
}

/// The kernel's limit for a unix socket path, terminator left out.
const UNIX_PATH_MAX: usize = 107;

impl FromStr for Address {
    type Err = AddressError;

    fn from_str(s: &str) -> Result<Self, AddressError> {
        let fail = |why| Err(AddressError { given: s.to_owned(), why });
        if let Some(path) = s.strip_prefix("unix:") {
            // unix:///abs is the URI spelling of unix:/abs
            let path = path.strip_prefix("//").filter(|p| p.starts_with('/')).unwrap_or(path);
            return match path.len() {
                0 => fail("the path is empty"),
                1..=UNIX_PATH_MAX => Ok(Self::Unix(PathBuf::from(path))),
                _ => fail("the path is longer than the 107 bytes a unix socket allows"),
            };
        }
        if s.starts_with("https://") {
            return fail("TLS is not supported");
        }
        let host_port = s.strip_prefix("http://").unwrap_or(s).trim_end_matches('/');
        match host_port.rsplit_once(':') {
            Some((host, port)) if !host.is_empty() && port.parse::<u16>().is_ok() => {
                Ok(Self::Tcp(host_port.to_owned()))
            }
            Some(_) => fail("the port is not a number below 65536"),
            None => fail("the port is missing"),
        }
    }
}

impl fmt::Display for Address {
    /// The form that clients connect to and that parses back.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
            Self::Tcp(host_port) => write!(f, "http://{host_port}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_forms_parse_and_print_back() {
        for (given, shown) in [
            ("unix:/tmp/a.sock", "unix:/tmp/a.sock"),
            ("unix:///tmp/a.sock", "unix:/tmp/a.sock"),
            ("127.0.0.1:80", "http://127.0.0.1:80"),
            ("http://localhost:9000/", "http://localhost:9000"),
            ("[::1]:7", "http://[::1]:7"),
        ] {
            let address: Address = given.parse().unwrap();
            assert_eq!(address.to_string(), shown);
            assert_eq!(shown.parse::<Address>().unwrap(), address);
        }
    }

    #[test]
    fn refusals_say_what_is_wrong() {
        let long = format!("unix:/{}", "x".repeat(UNIX_PATH_MAX));
        for (given, part) in [
            ("unix:", "empty"),
            (long.as_str(), "107"),
            ("https://a:1", "TLS"),
            ("localhost", "port is missing"),
            ("a:99999", "65536"),
            (":1", "want unix:"),
        ] {
            let line = given.parse::<Address>().unwrap_err().to_string();
            assert!(line.contains(part), "{line}");
        }
    }
}
